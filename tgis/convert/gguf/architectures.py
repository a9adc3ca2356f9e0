"""Converts the metadata of each supported GGUF architecture to the content of config.json."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tgis.convert.atomic_write import ConversionError
from tgis.convert.gguf import tensor_names
from tgis.convert.gguf.files import GgufFiles
from tgis.convert.gguf.metadata import show
from tgis.convert.gguf.rope import read_proportional, read_rope, read_scaling
from tgis.convert.gguf.tensor_names import TensorNames

Config = dict[str, Any]

# Like llama.cpp, this identifies models of these sizes by their number of layers.
GEMMA2_27B_LAYERS, GEMMA3_27B_LAYERS = 46, 62
GEMMA3_PERIOD = 6
GEMMA3_LOCAL_THETA = 10000.0
# Properties of models that their metadata do not have.
SMOLLM3_INTERVAL, OLMO3_PERIOD, OSS_PERIOD = 4, 4, 2
NEMOTRON_EXPERTS = "nemotron_h_moe"
SOFTMAX, SIGMOID = 1, 2  # llama.cpp's numbers of these functions of a router
QWEN3_NEXT_PERIOD = 4
# What llama.cpp sets for all models of Llama 4. The larger one does not normalize queries and keys.
LLAMA4_PERIOD = 4
LLAMA4_LENGTH = 8192
LLAMA4_SCALE = 0.1
LLAMA4_EXPERTS_WITHOUT_NORM = 128
DTYPES = {"F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True)
class Architecture:
    model_type: str
    class_name: str
    names: TensorNames
    read: Callable[[GgufFiles], Config]
    has_scaled_matrices: bool = False
    """True if files do not have the constant factors of layers, but matrices multiplied by them."""


def find_architecture(files: GgufFiles) -> Architecture:
    """Return the architecture of a model. Raises ConversionError with a list of all if it is not
    supported."""
    metadata = files.metadata
    name = metadata.architecture
    if name == "llama" and metadata.integer(".expert_count", 0):
        return MIXTRAL
    if name == "falcon" and "blk.0.attn_norm_2.weight" in files:
        return FALCON_TWO_NORMS
    if name == "olmo2" and metadata.integer(".attention.sliding_window", 0):
        return OLMO3
    if name == "deepseek2" and metadata.integer(".expert_gating_func", SOFTMAX) == SOFTMAX:
        return DEEPSEEK_V2
    if name == "t5":
        has_gates = "enc.blk.0.ffn_gate.weight" in files
        return Architecture("t5", "T5ForConditionalGeneration", tensor_names.t5_names(has_gates), _read_t5)
    if name not in ARCHITECTURES:
        known = ", ".join(sorted((*ARCHITECTURES, "t5")))
        raise metadata.refuse("general.architecture", f"{show(name)} is not supported; use one of: {known}")
    return ARCHITECTURES[name]


def make_config(files: GgufFiles, architecture: Architecture) -> Config:
    """Return the content of config.json. Raises ConversionError."""
    _check_table(files)
    config = {
        "architectures": [architecture.class_name],
        "model_type": architecture.model_type,
        "dtype": _stored_dtype(files),
        "vocab_size": files.tensors["token_embd.weight"].place.shape[0],
        "tie_word_embeddings": "output.weight" not in files,
        **architecture.read(files),
    }
    ids = {key: files.metadata.token_id(f"tokenizer.ggml.{key}") for key in ("bos_token_id", "eos_token_id")}
    return config | {key: value for key, value in ids.items() if value is not None}


def _check_table(files: GgufFiles) -> None:
    """Check the token embedding against the metadata. Raises ConversionError."""
    metadata = files.metadata
    tensor = files.tensors.get("token_embd.weight")
    if tensor is None:
        raise ConversionError(f"{metadata.path}: tensor token_embd.weight is missing")
    shape = tensor.place.shape
    width = metadata.integer(".embedding_length")
    count = len(metadata.texts("tokenizer.ggml.tokens"))
    if len(shape) != 2 or shape[1] != width:
        raise metadata.refuse(
            ".embedding_length", f"is {width}, and token_embd.weight has shape {list(shape)}"
        )
    if count > shape[0]:
        raise metadata.refuse(
            "tokenizer.ggml.tokens", f"are {count}, and token_embd.weight has {shape[0]} rows"
        )
    if metadata.integer(".vocab_size", shape[0]) != shape[0]:
        raise metadata.refuse(".vocab_size", f"is not {shape[0]}, the rows of token_embd.weight")


def _stored_dtype(files: GgufFiles) -> str:
    """Return the most frequent type of elements; float32 for codes."""
    sizes: Counter[str] = Counter()
    for tensor in files.tensors.values():
        sizes[DTYPES.get(tensor.place.type.name, "float32")] += tensor.place.num_bytes
    return max(sizes, key=lambda name: sizes[name])


def _sizes(files: GgufFiles) -> Config:
    metadata = files.metadata
    num_heads = metadata.integer(".attention.head_count")
    return {
        "num_hidden_layers": tensor_names.count_layers(files),
        "hidden_size": metadata.integer(".embedding_length"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": tensor_names.count_groups(files, num_heads),
        "intermediate_size": metadata.integer(".feed_forward_length", 0) or None,
        "max_position_embeddings": metadata.integer(".context_length"),
    }


def _read_llama(files: GgufFiles) -> Config:
    metadata = files.metadata
    sizes = _sizes(files)
    head_dim = metadata.integer(".attention.key_length", _head_dim(files))
    if metadata.integer(".attention.value_length", head_dim) != head_dim:
        raise metadata.refuse(".attention.value_length", f"is not {head_dim}, that of keys")
    return {
        **sizes,
        "head_dim": head_dim,
        "rms_norm_eps": metadata.number(".attention.layer_norm_rms_epsilon", 1e-5),
        "rope_parameters": read_rope(files, head_dim),
        "attention_bias": "blk.0.attn_q.bias" in files,
        "mlp_bias": "blk.0.ffn_up.bias" in files,
        "hidden_act": "silu",
    }


def _head_dim(files: GgufFiles) -> int:
    width, num_heads = (
        files.metadata.integer(".embedding_length"),
        files.metadata.integer(".attention.head_count"),
    )
    if not num_heads or width % num_heads:
        raise files.metadata.refuse(".attention.head_count", f"is {num_heads}, which does not divide {width}")
    return width // num_heads


def _read_mistral3(files: GgufFiles) -> Config:
    metadata = files.metadata
    config = _read_llama(files)
    rope = {**config["rope_parameters"]}
    if ".attention.temperature_scale" in metadata:
        rope["llama_4_scaling_beta"] = metadata.number(".attention.temperature_scale")
    if ".rope.scaling.yarn_log_multiplier" in metadata:
        rope |= {"mscale": 1.0, "mscale_all_dim": metadata.number(".rope.scaling.yarn_log_multiplier")}
    return {**config, "rope_parameters": rope}


def _read_experts(files: GgufFiles) -> Config:
    return {
        "num_local_experts": files.metadata.integer(".expert_count"),
        "num_experts_per_tok": files.metadata.integer(".expert_used_count"),
    }


def _read_mixtral(files: GgufFiles) -> Config:
    return _read_llama(files) | _read_experts(files) | {"sliding_window": None}


def _read_qwen3_moe(files: GgufFiles) -> Config:
    size = files.metadata.integer(
        ".expert_feed_forward_length", files.metadata.integer(".feed_forward_length", 0)
    )
    experts = _read_experts(files)
    return {
        **_read_llama(files),
        **experts,
        "num_experts": experts["num_local_experts"],
        "moe_intermediate_size": size,
        "norm_topk_prob": True,
    }


def _read_qwen2_moe(files: GgufFiles) -> Config:
    return {
        **_read_qwen3_moe(files),
        "norm_topk_prob": False,
        "qkv_bias": "blk.0.attn_q.bias" in files,
        "shared_expert_intermediate_size": files.metadata.integer(".expert_shared_feed_forward_length"),
    }


def _read_glm4_moe(files: GgufFiles) -> Config:
    metadata = files.metadata
    config = _read_qwen3_moe(files)
    if metadata.integer(".expert_gating_func", SIGMOID) != SIGMOID:
        raise metadata.refuse(".expert_gating_func", f"is not {SIGMOID}, a sigmoid")
    return {
        **config,
        "n_routed_experts": config["num_experts"],
        "n_shared_experts": metadata.integer(".expert_shared_count", 0),
        "norm_topk_prob": metadata.flag(".expert_weights_norm", True),
        "routed_scaling_factor": metadata.number(".expert_weights_scale", 1.0),
        "n_group": metadata.integer(".expert_group_count", 1),
        "topk_group": metadata.integer(".expert_group_used_count", 1),
        "first_k_dense_replace": metadata.integer(".leading_dense_block_count", 0),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in files,
    }


def _read_deepseek2(files: GgufFiles) -> Config:
    """Return the configuration of latent attention, and of experts without the choice of their groups."""
    metadata = files.metadata
    sizes = _sizes(files)
    if ".attention.temperature_scale" in metadata:
        raise metadata.refuse(".attention.temperature_scale", "is not supported")
    rope_dim = metadata.integer(".rope.dimension_count")
    # Newer files have the sizes of latents under the keys of older ones.
    query_dim, value_dim = (
        metadata.integer(f".attention.{kind}_length_mla", metadata.integer(f".attention.{kind}_length"))
        for kind in ("key", "value")
    )
    if query_dim <= rope_dim:
        raise metadata.refuse(".rope.dimension_count", f"is {rope_dim}, not a part of {query_dim} channels")
    return {
        **sizes,
        "num_key_value_heads": sizes["num_attention_heads"],
        "rms_norm_eps": metadata.number(".attention.layer_norm_rms_epsilon", 1e-6),
        "q_lora_rank": metadata.integer(".attention.q_lora_rank", 0) or None,
        "kv_lora_rank": metadata.integer(".attention.kv_lora_rank"),
        "qk_rope_head_dim": rope_dim,
        "qk_nope_head_dim": query_dim - rope_dim,
        "v_head_dim": value_dim,
        "rope_parameters": _read_latent_rope(files, rope_dim),
        "attention_bias": False,
        "hidden_act": "silu",
        "n_routed_experts": metadata.integer(".expert_count"),
        "num_experts_per_tok": metadata.integer(".expert_used_count"),
        "n_shared_experts": metadata.integer(".expert_shared_count", 0),
        "moe_intermediate_size": metadata.integer(".expert_feed_forward_length"),
        "first_k_dense_replace": metadata.integer(".leading_dense_block_count", 0),
        "norm_topk_prob": metadata.flag(".expert_weights_norm", False),
        "routed_scaling_factor": metadata.number(".expert_weights_scale", 1.0),
        "n_group": metadata.integer(".expert_group_count", 1) or 1,
        "topk_group": metadata.integer(".expert_group_used_count", 1) or 1,
    }


def _read_latent_rope(files: GgufFiles, dim: int) -> Config:
    """Return the rotary embedding, whose scaling does not change the size of queries and keys."""
    rope = read_rope(files, dim)
    if rope["rope_type"] != "yarn":
        return rope
    key = ".rope.scaling.yarn_log_multiplier"
    if key not in files.metadata:
        return {**rope, "attention_factor": 1.0}
    share = 10 * files.metadata.number(key)  # of this architecture only, files have a tenth
    return {**rope, "attention_factor": 1.0, "mscale": share, "mscale_all_dim": share}


def _read_deepseek_v2(files: GgufFiles) -> Config:
    config = _read_deepseek2(files)
    return {**config, "topk_method": "group_limited_greedy" if config["n_group"] > 1 else "greedy"}


def _read_deepseek_v3(files: GgufFiles) -> Config:
    if files.metadata.integer(".expert_gating_func") != SIGMOID:
        raise files.metadata.refuse(
            ".expert_gating_func", f"is not {SOFTMAX}, a softmax, or {SIGMOID}, a sigmoid"
        )
    return {**_read_deepseek2(files), "topk_method": "noaux_tc", "scoring_func": "sigmoid"}


def _read_qwen3_next(files: GgufFiles) -> Config:
    metadata = files.metadata
    config = _read_qwen2_moe(files)
    inner, num_heads = metadata.integer(".ssm.inner_size"), metadata.integer(".ssm.time_step_rank")
    if not num_heads or inner % num_heads:
        raise metadata.refuse(".ssm.inner_size", f"is {inner}, no multiple of {num_heads}")
    return {
        **config,
        "norm_topk_prob": True,
        "layer_types": _list_recurrent(files),
        "linear_num_value_heads": num_heads,
        "linear_num_key_heads": metadata.integer(".ssm.group_count"),
        "linear_key_head_dim": metadata.integer(".ssm.state_size"),
        "linear_value_head_dim": inner // num_heads,
        "linear_conv_kernel_dim": metadata.integer(".ssm.conv_kernel"),
    }


def _list_recurrent(files: GgufFiles) -> list[str]:
    """Return the types of layers, those of gated DeltaNet as `linear_attention`."""
    metadata = files.metadata
    count = tensor_names.count_layers(files)
    period = metadata.integer(".full_attention_interval", QWEN3_NEXT_PERIOD)
    if not period:
        raise metadata.refuse(".full_attention_interval", "is 0, no period of layers")
    return ["linear_attention" if (i + 1) % period else "full_attention" for i in range(count)]


def _read_llama4(files: GgufFiles) -> Config:
    metadata = files.metadata
    config = _read_llama(files)
    experts = _read_experts(files)
    if not metadata.integer(".attention.sliding_window", LLAMA4_LENGTH):
        raise metadata.refuse(".attention.sliding_window", "is 0, which is not supported")
    if metadata.integer(".attention.sliding_window_pattern", LLAMA4_PERIOD) != LLAMA4_PERIOD:
        raise metadata.refuse(".attention.sliding_window_pattern", f"is not {LLAMA4_PERIOD}")
    return {
        **config,
        **experts,
        "intermediate_size": metadata.integer(".expert_feed_forward_length"),
        "intermediate_size_mlp": config["intermediate_size"],
        "interleave_moe_layer_step": metadata.integer(".interleave_moe_layer_step"),
        "no_rope_layer_interval": LLAMA4_PERIOD,
        "attention_chunk_size": LLAMA4_LENGTH,
        "attn_temperature_tuning": True,
        "floor_scale": LLAMA4_LENGTH,
        "attn_scale": LLAMA4_SCALE,
        "use_qk_norm": experts["num_local_experts"] != LLAMA4_EXPERTS_WITHOUT_NORM,
    }


def _read_gpt_oss(files: GgufFiles) -> Config:
    metadata = files.metadata
    config = _read_llama(files)
    size = metadata.integer(".expert_feed_forward_length", config["intermediate_size"] or 0)
    return {
        **config,
        **_read_experts(files),
        "intermediate_size": size,
        "sliding_window": metadata.integer(".attention.sliding_window"),
        "layer_types": _periodic_windows(OSS_PERIOD, config["num_hidden_layers"]),
        "rope_parameters": {**config["rope_parameters"], "truncate": False},
    }


def _read_gemma(files: GgufFiles) -> Config:
    return _read_llama(files) | {"hidden_act": "gelu_pytorch_tanh"}


def _read_gemma2(files: GgufFiles) -> Config:
    metadata = files.metadata
    config = _read_llama(files)
    return {
        **config,
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": metadata.integer(".attention.sliding_window", 4096),
        "query_pre_attn_scalar": _score_width(files, GEMMA2_27B_LAYERS),
        "attn_logit_softcapping": metadata.number(".attn_logit_softcapping", 50.0),
        "final_logit_softcapping": metadata.number(".final_logit_softcapping", 30.0),
    }


def _read_gemma3(files: GgufFiles) -> Config:
    metadata = files.metadata
    config = _read_llama(files)
    local_theta = metadata.number(".rope.freq_base_swa", GEMMA3_LOCAL_THETA)
    full = {
        "rope_type": "default",
        "rope_theta": metadata.number(".rope.freq_base", 1e6),
        **read_scaling(files),
    }
    local = {"rope_type": "default", "rope_theta": local_theta}
    has_cap = ".final_logit_softcapping" in metadata
    period = metadata.integer(".attention.sliding_window_pattern", GEMMA3_PERIOD)
    if not period:
        raise metadata.refuse(".attention.sliding_window_pattern", "is 0, no period of layers")
    kinds = _periodic_windows(period, config["num_hidden_layers"])
    return {
        **config,
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": metadata.integer(".attention.sliding_window", 4096),
        "layer_types": kinds,
        "query_pre_attn_scalar": _score_width(files, GEMMA3_27B_LAYERS),
        "attn_logit_softcapping": None,
        "final_logit_softcapping": metadata.number(".final_logit_softcapping") if has_cap else None,
        "rope_parameters": {"full_attention": full, "sliding_attention": local},
    }


def _read_gemma4(files: GgufFiles) -> Config:
    metadata = files.metadata
    count = tensor_names.count_layers(files)
    if count < 1:
        raise metadata.refuse(".block_count", f"leaves {count} layers")
    key = ".attention.sliding_window_pattern"
    kinds = [
        "sliding_attention" if each else "full_attention" for each in metadata.layer_integers(key, count)
    ]
    widths = metadata.layer_integers(".feed_forward_length", count)
    has_cap = ".final_logit_softcapping" in metadata
    local_theta = metadata.number(".rope.freq_base_swa", GEMMA3_LOCAL_THETA)
    return {
        "num_hidden_layers": count,
        "hidden_size": metadata.integer(".embedding_length"),
        "intermediate_size": widths[0],
        "use_double_wide_mlp": widths[-1] > widths[0],
        "max_position_embeddings": metadata.integer(".context_length"),
        "rms_norm_eps": metadata.number(".attention.layer_norm_rms_epsilon", 1e-6),
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": kinds,
        "sliding_window": metadata.integer(".attention.sliding_window"),
        "final_logit_softcapping": metadata.number(".final_logit_softcapping") if has_cap else None,
        "num_kv_shared_layers": metadata.integer(".attention.shared_kv_layers", 0),
        "pad_token_id": metadata.token_id("tokenizer.ggml.padding_token_id") or 0,
        "rope_parameters": {
            "full_attention": read_proportional(files, metadata.number(".rope.freq_base", 1e6)),
            "sliding_attention": {"rope_type": "default", "rope_theta": local_theta},
        },
        **_read_gemma4_heads(files, kinds),
        **_read_layer_inputs(files),
        **_read_gemma4_experts(files),
    }


def _read_gemma4_heads(files: GgufFiles, kinds: Sequence[str]) -> Config:
    """Return the heads, which are others in layers with full attention."""
    metadata = files.metadata
    groups = metadata.layer_integers(".attention.head_count_kv", len(kinds))
    head_dim = metadata.integer(".attention.key_length_swa")
    full_dim = metadata.integer(".attention.key_length")
    full = [i for i, kind in enumerate(kinds) if kind == "full_attention"]
    windowed = [groups[i] for i in range(len(kinds)) if i not in full]
    num_own = len(kinds) - metadata.integer(".attention.shared_kv_layers", 0)
    return {
        "num_attention_heads": metadata.integer(".attention.head_count"),
        "num_key_value_heads": (windowed or groups)[0],
        "head_dim": head_dim,
        "per_layer_config": {str(i): {"head_dim": full_dim, "num_key_value_heads": groups[i]} for i in full},
        "attention_k_eq_v": any(f"blk.{i}.attn_v.weight" not in files for i in full if i < num_own),
    }


def _read_layer_inputs(files: GgufFiles) -> Config:
    width = files.metadata.integer(".embedding_length_per_layer_input", 0)
    table = files.tensors.get("per_layer_token_embd.weight")
    if not width:
        return {"hidden_size_per_layer_input": 0}
    if table is None:
        raise ConversionError(f"{files.metadata.path}: tensor per_layer_token_embd.weight is missing")
    return {"hidden_size_per_layer_input": width, "vocab_size_per_layer_input": table.place.shape[0]}


def _read_gemma4_experts(files: GgufFiles) -> Config:
    metadata = files.metadata
    if not metadata.integer(".expert_count", 0):
        return {"enable_moe_block": False}
    return {
        "enable_moe_block": True,
        "num_experts": metadata.integer(".expert_count"),
        "top_k_experts": metadata.integer(".expert_used_count"),
        "moe_intermediate_size": metadata.integer(".expert_feed_forward_length"),
    }


def _score_width(files: GgufFiles, layers_of_27b: int) -> int:
    """Return the number whose square root divides the attention scores; the metadata does not have it."""
    is_27b = files.metadata.integer(".block_count") == layers_of_27b
    return _head_dim(files) if is_27b else files.metadata.integer(".attention.key_length", _head_dim(files))


def _read_smollm3(files: GgufFiles) -> Config:
    return _read_llama(files) | {"no_rope_layer_interval": SMOLLM3_INTERVAL}


def _read_olmo3(files: GgufFiles) -> Config:
    config = _read_llama(files)
    full = config["rope_parameters"]
    local = {"rope_type": "default", "rope_theta": full["rope_theta"]}
    return {
        **config,
        "sliding_window": files.metadata.integer(".attention.sliding_window"),
        "layer_types": _periodic_windows(OLMO3_PERIOD, config["num_hidden_layers"]),
        "rope_parameters": {"full_attention": full, "sliding_attention": local},
    }


def _periodic_windows(period: int, num_layers: int) -> list[str]:
    """Return the types of layers of which every `period`-th one has no window."""
    return ["sliding_attention" if (i + 1) % period else "full_attention" for i in range(num_layers)]


def _read_phi3(files: GgufFiles) -> Config:
    config = _read_llama(files)
    window = files.metadata.integer(".attention.sliding_window", 0)
    lengths = {}
    if original := config["rope_parameters"].get("original_max_position_embeddings"):
        lengths["original_max_position_embeddings"] = original
    return {**config, **lengths, "sliding_window": window or None}


def _read_granite(files: GgufFiles) -> Config:
    metadata = files.metadata
    return {
        **_read_llama(files),
        "attention_multiplier": metadata.number(".attention.scale", _head_dim(files) ** -0.5),
        "residual_multiplier": metadata.number(".residual_scale", 1.0),
        "embedding_multiplier": metadata.number(".embedding_scale", 1.0),
        "logits_scaling": metadata.number(".logit_scale", 1.0),
    }


def _read_granite_moe(files: GgufFiles) -> Config:
    return _read_granite(files) | _read_experts(files)


def _read_granite_hybrid(files: GgufFiles) -> Config:
    metadata = files.metadata
    config = _read_granite(files)
    num_experts = metadata.integer(".expert_count", 0)
    width = metadata.integer(".embedding_length")
    expand, rest = divmod(metadata.integer(".ssm.inner_size"), width)
    if rest:
        raise metadata.refuse(".ssm.inner_size", f"is no multiple of {width}")
    groups = tensor_names.list_groups(files)
    shared = files.tensors.get(f"blk.0.ffn_up{'_shexp' if num_experts else ''}.weight")
    return {
        **config,
        **(_read_experts(files) if num_experts else {"num_local_experts": 0}),
        "shared_intermediate_size": shared.place.shape[0] if shared is not None else 0,
        "layer_types": ["full_attention" if count else "linear_attention" for count in groups],
        "position_embedding_type": "rope" if metadata.flag(".rope.scaling.finetuned", False) else "nope",
        "mamba_n_heads": metadata.integer(".ssm.time_step_rank"),
        "mamba_n_groups": metadata.integer(".ssm.group_count"),
        "mamba_d_state": metadata.integer(".ssm.state_size"),
        "mamba_d_conv": metadata.integer(".ssm.conv_kernel"),
        "mamba_expand": expand,
        "mamba_conv_bias": any(name.endswith("ssm_conv1d.bias") for name in files.tensors),
        "mamba_proj_bias": any(name.endswith("ssm_in.bias") for name in files.tensors),
        "attention_bias": any(name.endswith("attn_q.bias") for name in files.tensors),
    }


def _read_falcon_h1(files: GgufFiles) -> Config:
    """Return the configuration without factors, which are part of the weights in the file."""
    metadata, names = files.metadata, files.tensors
    return {
        **_read_llama(files),
        "mamba_d_ssm": metadata.integer(".ssm.inner_size"),
        "mamba_n_heads": metadata.integer(".ssm.time_step_rank"),
        "mamba_n_groups": metadata.integer(".ssm.group_count"),
        "mamba_d_state": metadata.integer(".ssm.state_size"),
        "mamba_d_conv": metadata.integer(".ssm.conv_kernel"),
        "mamba_rms_norm": "blk.0.ssm_norm.weight" in names,
        "mamba_norm_before_gate": False,
        "mamba_conv_bias": "blk.0.ssm_conv1d.bias" in names,
        "mamba_proj_bias": "blk.0.ssm_in.bias" in names,
        "projectors_bias": "blk.0.ssm_out.bias" in names,
    }


def _read_mamba2(files: GgufFiles) -> Config:
    metadata = files.metadata
    width, inner = metadata.integer(".embedding_length"), metadata.integer(".ssm.inner_size")
    num_heads = metadata.integer(".ssm.time_step_rank")
    if not width or not num_heads or inner % width or inner % num_heads:
        raise metadata.refuse(".ssm.inner_size", f"is {inner}, no multiple of {width} and {num_heads}")
    return {
        "num_hidden_layers": tensor_names.count_layers(files),
        "hidden_size": width,
        "layer_norm_epsilon": metadata.number(".attention.layer_norm_rms_epsilon", 1e-5),
        "expand": inner // width,
        "num_heads": num_heads,
        "head_dim": inner // num_heads,
        "n_groups": metadata.integer(".ssm.group_count", 1),
        "state_size": metadata.integer(".ssm.state_size"),
        "conv_kernel": metadata.integer(".ssm.conv_kernel"),
        "use_bias": any(name.endswith("ssm_in.bias") for name in files.tensors),
        "use_conv_bias": any(name.endswith("ssm_conv1d.bias") for name in files.tensors),
    }


def _read_nemotron_h(files: GgufFiles) -> Config:
    metadata = files.metadata
    mamba = _read_mamba2(files)
    groups = tensor_names.list_groups(files)
    has_experts = metadata.architecture == NEMOTRON_EXPERTS
    widths = metadata.layer_integers(".feed_forward_length", len(groups))
    feed_forward = "moe" if has_experts else "mlp"
    return {
        **mamba,
        **(_read_nemotron_experts(files) if has_experts else {}),
        "mamba_num_heads": mamba["num_heads"],
        "mamba_head_dim": mamba["head_dim"],
        "ssm_state_size": mamba["state_size"],
        "layers_block_type": [
            "full_attention" if count else feed_forward if width else "linear_attention"
            for count, width in zip(groups, widths, strict=True)
        ],
        "num_attention_heads": metadata.integer(".attention.head_count"),
        "num_key_value_heads": max(groups, default=0) or None,
        "head_dim": metadata.integer(".attention.key_length", _head_dim(files)),
        "intermediate_size": max(widths, default=0) or None,
        "max_position_embeddings": metadata.integer(".context_length"),
        "mlp_hidden_act": "relu2",
        "mlp_bias": any(name.endswith("ffn_up.bias") for name in files.tensors),
    }


def _read_nemotron_experts(files: GgufFiles) -> Config:
    metadata = files.metadata
    latent_size = metadata.integer(".moe_latent_size", 0)
    return {
        "n_routed_experts": metadata.integer(".expert_count"),
        "num_experts_per_tok": metadata.integer(".expert_used_count"),
        "moe_intermediate_size": metadata.integer(".expert_feed_forward_length"),
        "moe_shared_expert_intermediate_size": metadata.integer(".expert_shared_feed_forward_length"),
        "moe_latent_size": latent_size or None,
        "norm_topk_prob": metadata.flag(".expert_weights_norm", True),
        "routed_scaling_factor": metadata.number(".expert_weights_scale", 1.0),
        "n_group": metadata.integer(".expert_group_count", 1),
        "topk_group": metadata.integer(".expert_group_used_count", 1),
    }


def _read_starcoder2(files: GgufFiles) -> Config:
    config = _read_llama(files)
    window = files.metadata.integer(".attention.sliding_window", 0)
    return {
        **config,
        "use_bias": "blk.0.attn_q.bias" in files,
        "norm_epsilon": files.metadata.number(".attention.layer_norm_epsilon", 1e-5),
        "hidden_act": "gelu_pytorch_tanh",
        "sliding_window": window or None,
    }


def _read_gpt_neox(files: GgufFiles) -> Config:
    metadata = files.metadata
    rope = read_rope(files, _head_dim(files))
    return {
        **_sizes(files),
        "layer_norm_eps": metadata.number(".attention.layer_norm_epsilon", 1e-5),
        "use_parallel_residual": metadata.flag(".use_parallel_residual", True),
        "attention_bias": "blk.0.attn_qkv.bias" in files,
        "hidden_act": "gelu",
        "rotary_pct": rope.pop("partial_rotary_factor", 1.0),
        "rotary_emb_base": rope["rope_theta"],
        "rope_parameters": rope,
    }


def _read_gpt2(files: GgufFiles) -> Config:
    sizes = _sizes(files)
    return {
        "n_embd": sizes["hidden_size"],
        "n_layer": sizes["num_hidden_layers"],
        "n_head": sizes["num_attention_heads"],
        "n_inner": sizes["intermediate_size"],
        "n_positions": sizes["max_position_embeddings"],
        "layer_norm_epsilon": files.metadata.number(".attention.layer_norm_epsilon", 1e-5),
        "activation_function": "gelu_new",
    }


def _read_falcon(files: GgufFiles) -> Config:
    sizes = _sizes(files)
    is_new = sizes["num_key_value_heads"] > 1
    return {
        **sizes,
        "num_kv_heads": sizes["num_key_value_heads"],
        "new_decoder_architecture": is_new,
        "multi_query": not is_new,
        "parallel_attn": True,
        "num_ln_in_parallel_attn": 2 if "blk.0.attn_norm_2.weight" in files else 1,
        "bias": "blk.0.attn_qkv.bias" in files,
        "alibi": False,
        "ffn_hidden_size": sizes["intermediate_size"],
        "layer_norm_epsilon": files.metadata.number(".attention.layer_norm_epsilon", 1e-5),
        "activation": "gelu",
        "rope_parameters": read_rope(files, _head_dim(files)),
    }


def _read_bloom(files: GgufFiles) -> Config:
    sizes = _sizes(files)
    return {
        "hidden_size": sizes["hidden_size"],
        "n_layer": sizes["num_hidden_layers"],
        "n_head": sizes["num_attention_heads"],
        "seq_length": sizes["max_position_embeddings"],
        "layer_norm_epsilon": files.metadata.number(".attention.layer_norm_epsilon", 1e-5),
    }


def _read_mpt(files: GgufFiles) -> Config:
    metadata = files.metadata
    sizes = _sizes(files)
    width = sizes["hidden_size"]
    inner = sizes["intermediate_size"] or 0
    if not inner or inner % width:
        raise metadata.refuse(".feed_forward_length", f"is {inner}, no multiple of {width}")
    has_clamp = ".attention.clamp_kqv" in metadata
    return {
        "d_model": width,
        "n_layers": sizes["num_hidden_layers"],
        "n_heads": sizes["num_attention_heads"],
        "max_seq_len": sizes["max_position_embeddings"],
        "expansion_ratio": inner // width,
        "layer_norm_epsilon": metadata.number(".attention.layer_norm_epsilon", 1e-5),
        "attn_config": {
            "alibi": True,
            "alibi_bias_max": metadata.number(".attention.max_alibi_bias", 8.0),
            "clip_qkv": metadata.number(".attention.clamp_kqv") if has_clamp else None,
            "attn_type": "grouped_query_attention",
            "kv_n_heads": sizes["num_key_value_heads"],
        },
    }


def _read_t5(files: GgufFiles) -> Config:
    metadata = files.metadata
    sizes = _sizes(files)
    has_gates = "enc.blk.0.ffn_gate.weight" in files
    return {
        "d_model": sizes["hidden_size"],
        "d_kv": metadata.integer(".attention.key_length", _head_dim(files)),
        "d_ff": sizes["intermediate_size"],
        "num_layers": sizes["num_hidden_layers"],
        "num_decoder_layers": metadata.integer(".decoder_block_count", sizes["num_hidden_layers"]),
        "num_heads": sizes["num_attention_heads"],
        "n_positions": sizes["max_position_embeddings"],
        "relative_attention_num_buckets": metadata.integer(".attention.relative_buckets_count", 32),
        "layer_norm_epsilon": metadata.number(".attention.layer_norm_rms_epsilon", 1e-6),
        "feed_forward_proj": "gated-gelu" if has_gates else "relu",
        "decoder_start_token_id": metadata.integer(".decoder_start_token_id", 0),
        "is_encoder_decoder": True,
    }


MIXTRAL = Architecture("mixtral", "MixtralForCausalLM", tensor_names.MIXTRAL, _read_mixtral)
FALCON_TWO_NORMS = Architecture("falcon", "FalconForCausalLM", tensor_names.FALCON_TWO_NORMS, _read_falcon)
DEEPSEEK_V2 = Architecture("deepseek_v2", "DeepseekV2ForCausalLM", tensor_names.DEEPSEEK2, _read_deepseek_v2)
OLMO3 = Architecture("olmo3", "Olmo3ForCausalLM", tensor_names.OLMO2, _read_olmo3)
ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", "LlamaForCausalLM", tensor_names.LLAMA, _read_llama),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", tensor_names.QWEN2, _read_llama),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", tensor_names.QWEN3, _read_llama),
    "qwen3moe": Architecture("qwen3_moe", "Qwen3MoeForCausalLM", tensor_names.QWEN3_MOE, _read_qwen3_moe),
    "qwen2moe": Architecture("qwen2_moe", "Qwen2MoeForCausalLM", tensor_names.QWEN2_MOE, _read_qwen2_moe),
    "glm4moe": Architecture("glm4_moe", "Glm4MoeForCausalLM", tensor_names.GLM4_MOE, _read_glm4_moe),
    "deepseek2": Architecture(
        "deepseek_v3", "DeepseekV3ForCausalLM", tensor_names.DEEPSEEK2, _read_deepseek_v3
    ),
    "qwen3next": Architecture(
        "qwen3_next", "Qwen3NextForCausalLM", tensor_names.QWEN3_NEXT, _read_qwen3_next
    ),
    "llama4": Architecture("llama4_text", "Llama4ForCausalLM", tensor_names.LLAMA4, _read_llama4),
    "gpt-oss": Architecture("gpt_oss", "GptOssForCausalLM", tensor_names.GPT_OSS, _read_gpt_oss),
    "mistral3": Architecture("ministral3", "Ministral3ForCausalLM", tensor_names.LLAMA, _read_mistral3),
    "gemma": Architecture("gemma", "GemmaForCausalLM", tensor_names.GEMMA, _read_gemma),
    "gemma2": Architecture("gemma2", "Gemma2ForCausalLM", tensor_names.GEMMA2, _read_gemma2),
    "gemma3": Architecture("gemma3_text", "Gemma3ForCausalLM", tensor_names.GEMMA3, _read_gemma3),
    "gemma4": Architecture("gemma4_text", "Gemma4ForCausalLM", tensor_names.GEMMA4, _read_gemma4),
    "phi3": Architecture("phi3", "Phi3ForCausalLM", tensor_names.PHI3, _read_phi3),
    "granite": Architecture("granite", "GraniteForCausalLM", tensor_names.LLAMA, _read_granite),
    "granitemoe": Architecture(
        "granitemoe", "GraniteMoeForCausalLM", tensor_names.GRANITE_MOE, _read_granite_moe
    ),
    "granitehybrid": Architecture(
        "granitemoehybrid",
        "GraniteMoeHybridForCausalLM",
        tensor_names.GRANITE_HYBRID,
        _read_granite_hybrid,
    ),
    "falcon-h1": Architecture(
        "falcon_h1",
        "FalconH1ForCausalLM",
        tensor_names.FALCON_H1,
        _read_falcon_h1,
        has_scaled_matrices=True,
    ),
    "mamba2": Architecture("mamba2", "Mamba2ForCausalLM", tensor_names.MAMBA2, _read_mamba2),
    "nemotron_h": Architecture(
        "nemotron_h", "NemotronHForCausalLM", tensor_names.NEMOTRON_H, _read_nemotron_h
    ),
    NEMOTRON_EXPERTS: Architecture(
        "nemotron_h", "NemotronHForCausalLM", tensor_names.NEMOTRON_H, _read_nemotron_h
    ),
    "olmo2": Architecture("olmo2", "Olmo2ForCausalLM", tensor_names.OLMO2, _read_llama),
    "smollm3": Architecture("smollm3", "SmolLM3ForCausalLM", tensor_names.LLAMA, _read_smollm3),
    "gptneox": Architecture("gpt_neox", "GPTNeoXForCausalLM", tensor_names.GPT_NEOX, _read_gpt_neox),
    "gpt2": Architecture("gpt2", "GPT2LMHeadModel", tensor_names.GPT2, _read_gpt2),
    "starcoder2": Architecture(
        "starcoder2", "Starcoder2ForCausalLM", tensor_names.STARCODER2, _read_starcoder2
    ),
    "falcon": Architecture("falcon", "FalconForCausalLM", tensor_names.FALCON, _read_falcon),
    "bloom": Architecture("bloom", "BloomForCausalLM", tensor_names.BLOOM, _read_bloom),
    "mpt": Architecture("mpt", "MptForCausalLM", tensor_names.MPT, _read_mpt),
}
