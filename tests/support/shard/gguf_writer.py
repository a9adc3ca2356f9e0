"""Writes a transformers checkpoint as a GGUF file with the published package, like llama.cpp's scripts, and
rounds the checkpoint to the numbers in the file."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

Array = NDArray[Any]
ARCHITECTURES = {value: key for key, value in gguf.MODEL_ARCH_NAMES.items()}
PERMUTED = ("llama", "smollm3", "granite", "granitemoe", "granitehybrid", "mistral3")
TYPES = (Type.Q8_0, Type.Q4_0, Type.Q5_1)
# Offsets of the float16 factors in blocks of the types to which the package cannot round.
FACTORS = {
    Type.Q2_K: (80, 82),
    Type.Q3_K: (108,),
    Type.Q4_K: (0, 2),
    Type.Q5_K: (0, 2),
    Type.Q6_K: (208,),
    Type.IQ4_NL: (0,),
    Type.IQ4_XS: (0,),
    Type.IQ2_XS: (0,),
}


def write_gguf(
    directory: Path,
    file: Path,
    architecture: str,
    plain: Type | None = None,
    kinds: Mapping[str, Type] = MappingProxyType({}),
) -> None:
    """Write the file. `plain` is the type of all matrices, if they are not to be rounded to codes of several
    types; `kinds` has the types of some matrices by name."""
    config = json.loads((directory / "config.json").read_text())
    if "layers_block_type" in config:
        config["num_hidden_layers"] = len(config["layers_block_type"])
    writer = gguf.GGUFWriter(file, architecture)
    add_metadata(writer, config)
    add_tokens(writer, config["vocab_size"])
    rounded = {}
    stored: dict[str, tuple[Array, Type]] = {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        is_transposed = architecture == "gpt2" and name.endswith(".weight") and ".c_" in name
        is_transposed |= architecture in ("gpt-oss", "llama4") and name.endswith("_proj")
        weights = (tensor.mT if is_transposed else tensor).float().numpy()
        kind = kinds.get(name) or choose_type(weights, name, plain)
        codes = make_blocks(np.ascontiguousarray(weights), kind)
        back = torch.from_numpy(gguf.dequantize(codes, kind)).reshape(weights.shape)
        rounded[name] = (back.mT if is_transposed else back).contiguous()
        stored |= {each: (part, kind) for each, part in rearrange(architecture, config, name, codes).items()}
    if config.get("scale_decoder_outputs") is False:  # a later T5, whose published checkpoints have a head
        stored["lm_head.weight"] = stored["shared.weight"]
    for name, (codes, kind) in join_experts(stored).items():
        writer.add_tensor(rename(architecture, config, name), codes, raw_dtype=kind)
    add_rope_factors(writer, config)
    add_draft_layers(writer, config)
    save_file(rounded, directory / "model.safetensors", metadata={"format": "pt"})
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def make_blocks(weights: Array, kind: Type) -> Array:
    """Return codes of a type. If the package cannot round to it, the codes are random, with numbers about as
    large as the weights."""
    if kind not in FACTORS:
        return gguf.quantize(weights, kind)
    size, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    rng, (height, width) = np.random.default_rng(int(kind)), weights.shape
    blocks = rng.integers(0, 256, (height, width // size, num_bytes), np.uint8)

    def put(factors: Array) -> Array:
        """Return the blocks with these factors, [num_rows, num_blocks]."""
        for place in FACTORS[kind]:
            blocks[:, :, place : place + 2] = factors.astype(np.float16)[:, :, None].view(np.uint8)
        return blocks.reshape(height, -1)

    ones = gguf.dequantize(put(np.ones(blocks.shape[:2])), kind)
    return put(rng.uniform(0.5, 1.5, blocks.shape[:2]) * weights.std() / ones.std())


def choose_type(weights: Array, name: str, plain: Type | None) -> Type:
    """Return a type, the same one for all experts of a layer."""
    if weights.ndim == 1 or "conv1d" in name or name.endswith("_proj_bias"):
        return Type.F32
    if name.endswith(("kv_b_proj.weight", "shared_expert_gate.weight")):
        return Type.F16  # its columns become rows, or it becomes a vector
    if plain is not None:
        return plain
    if name.endswith("experts.gate_up_proj") and weights.shape[-1] % 32 == 0:
        return Type.MXFP4  # as published files of gpt-oss
    name = name.partition(".experts.")[0]
    return TYPES[sum(name.encode()) % len(TYPES)] if weights.shape[-1] % 32 == 0 else Type.F16


def rename(architecture: str, config: dict[str, Any], name: str) -> str:
    if name.startswith("blk."):
        return name
    count = first(config, "num_hidden_layers", "n_layer", "n_layers", "num_layers")
    names = gguf.get_tensor_name_map(ARCHITECTURES[architecture], count)
    name = name.removeprefix("transformer.") if architecture == "bloom" else name
    name = name.replace("e_score_correction_bias", "e_score_correction.bias")
    if architecture == "nemotron_h_moe" and ".experts." in name:
        name = name.replace("backbone", "model").replace("mixer", "mlp")
    result = names.get_name(name, try_suffixes=(".weight", ".bias"))
    assert result is not None, name
    return result


def rearrange(architecture: str, config: dict[str, Any], name: str, rows: Array) -> dict[str, Array]:
    """Return the rows, or the bytes of their codes, in the file's order; for a stack of experts, its
    parts."""
    if architecture in PERMUTED and ("q_proj" in name or "k_proj" in name):
        key = "num_key_value_heads" if "k_proj" in name else "num_attention_heads"
        shape = (config[key], 2, rows.shape[0] // config[key] // 2, *rows.shape[1:])
        return {name: rows.reshape(shape).swapaxes(1, 2).reshape(rows.shape)}
    if architecture in ("bloom", "gptneox", "falcon") and "query_key_value" in name:
        return {name: split_groups(config, rows)}
    is_offset = architecture in ("gemma", "gemma2", "gemma3")
    is_offset |= architecture == "qwen3next" and "linear_attn" not in name
    if is_offset and name.endswith("norm.weight"):
        return {name: rows + np.float32(1)}
    if name.endswith("kv_b_proj.weight") and has_split_heads(config):
        return split_heads(config, name, rows)
    if architecture == "qwen3next" and "linear_attn" in name:
        return rearrange_delta_net(config, name, rows)
    if architecture == "qwen3next" and name.endswith("shared_expert_gate.weight"):
        return {name: rows[0]}
    if architecture == "gemma4" and (".router.scale" in name or ".per_expert_scale" in name):
        layer, end = name.split(".")[2], "ffn_gate_inp" if ".router.scale" in name else "ffn_down_exps"
        return {f"blk.{layer}.{end}.scale": rows}
    if architecture == "gemma4" and (name.endswith("layer_scalar") or ".experts." in name):
        return rearrange_gemma4(config, name, rows)
    if architecture == "llama4" and ".experts." in name:
        return rearrange_llama4(name, rows)
    if architecture == "gpt-oss" and (".experts." in name or name.endswith("sinks")):
        return rearrange_oss(name, rows)
    if architecture == "falcon-h1":
        rows = rows * scale_rows(config, name, len(rows)).reshape(-1, *(1 for _ in rows.shape[1:]))
    if ".mamba." in name or "shared_mlp" in name or ".mixer." in name:
        return rearrange_hybrid(config, name, rows)
    if "block_sparse_moe.input_linear" in name:
        layer, half = name.split(".")[2], rows.shape[1] // 2
        return {
            f"blk.{layer}.ffn_gate_exps.weight": rows[:, :half],
            f"blk.{layer}.ffn_up_exps.weight": rows[:, half:],
        }
    return {name: rows}


def scale_rows(config: dict[str, Any], name: str, height: int) -> Array:
    """Return the factors of Falcon H1 that are part of a tensor in the file, as float32 [height]."""
    factors = {
        "gate_proj": config["mlp_multipliers"][0],
        "down_proj": config["mlp_multipliers"][1],
        "q_proj": config["attention_in_multiplier"],
        "k_proj": config["attention_in_multiplier"] * config["key_multiplier"],
        "v_proj": config["attention_in_multiplier"],
        "o_proj": config["attention_out_multiplier"],
        "out_proj": config["ssm_out_multiplier"],
        "in_proj": config["ssm_in_multiplier"],
        "lm_head": config["lm_head_multiplier"],
        "embed_tokens": config["embedding_multiplier"],
    }
    module = name.removesuffix(".weight").rpartition(".")[2]
    scales = np.full(height, factors.get(module, 1.0), np.float32)
    if module == "in_proj":
        group = config["mamba_n_groups"] * config["mamba_d_state"]
        widths = [config["mamba_d_ssm"]] * 2 + [group] * 2 + [config["mamba_n_heads"]]
        scales *= np.repeat(np.array(config["ssm_multipliers"], np.float32), widths)
    return scales


def rearrange_oss(name: str, rows: Array) -> dict[str, Array]:
    """Return the parts of gpt-oss that one tensor holds for all experts, like llama.cpp's script."""
    layer, end = name.split(".")[2], "bias" if name.endswith("_bias") else "weight"
    if name.endswith("sinks"):
        return {f"{name}.weight": rows}
    if "down_proj" in name:
        return {f"blk.{layer}.ffn_down_exps.{end}": rows}
    return {f"blk.{layer}.ffn_{x}_exps.{end}": rows[:, i::2] for i, x in enumerate(("gate", "up"))}


def rearrange_hybrid(config: dict[str, Any], name: str, rows: Array) -> dict[str, Array]:
    """Return the parts of Granite 4 that are not attention or experts, like llama.cpp's script."""
    has_experts = bool(config.get("num_local_experts"))
    layer, end = name.split(".")[2], "_shexp" if has_experts else ""
    if "shared_mlp.input_linear" in name:
        gate, up = np.split(rows, 2)
        return {f"blk.{layer}.ffn_gate{end}.weight": gate, f"blk.{layer}.ffn_up{end}.weight": up}
    if "shared_mlp.output_linear" in name:
        return {f"blk.{layer}.ffn_down{end}.weight": rows}
    if name.endswith("A_log"):
        return {name: -np.exp(rows)[:, None]}
    if name.endswith(".D"):
        return {name: rows[:, None]}
    if name.endswith("dt_bias"):
        return {name.replace("dt_bias", "dt_proj.bias"): rows}
    if name.endswith("norm.weight"):
        return {name: rows.reshape(first(config, "mamba_n_groups", "n_groups"), -1)}
    return {name: rows.squeeze(1) if name.endswith("conv1d.weight") else rows}


def has_split_heads(config: dict[str, Any]) -> bool:
    """Return True for a file like newer ones, whose keys and values of latents are apart."""
    return config["q_lora_rank"] is not None


def split_heads(config: dict[str, Any], name: str, rows: Array) -> dict[str, Array]:
    heads = rows.reshape(config["num_attention_heads"], -1, rows.shape[1])
    keys, values = np.split(heads, [config["qk_nope_head_dim"]], 1)
    return {
        name.replace("kv_b", "k_b"): np.ascontiguousarray(keys.swapaxes(1, 2)),
        name.replace("kv_b", "v_b"): np.ascontiguousarray(values),
    }


def rearrange_delta_net(config: dict[str, Any], name: str, rows: Array) -> dict[str, Array]:
    """Return the parts of gated DeltaNet, like llama.cpp's script."""
    layer = name.split(".")[2]
    if name.endswith("in_proj_qkvz.weight") and config["linear_num_key_heads"] > 1:
        key, groups = config["linear_key_head_dim"], config["linear_num_key_heads"]
        width = config["linear_value_head_dim"] * config["linear_num_value_heads"] // groups
        grouped = rows.reshape(groups, -1, rows.shape[1])
        parts = np.split(grouped, [key, 2 * key, 2 * key + width], 1)
        *projections, gates = (part.reshape(-1, rows.shape[1]) for part in parts)
        return {
            f"blk.{layer}.attn_qkv.weight": np.concatenate(projections),
            f"blk.{layer}.attn_gate.weight": gates,
        }
    if name.endswith("A_log"):
        return {name: -np.exp(rows)}
    if name.endswith("dt_bias"):
        return {name.replace("dt_bias", "dt_proj.bias"): rows}
    return {name: rows.squeeze(1) if name.endswith("conv1d.weight") else rows}


def rearrange_gemma4(config: dict[str, Any], name: str, rows: Array) -> dict[str, Array]:
    """Return the experts, in odd layers with a tensor for each projection, and the scalars of layers."""
    layer = name.split(".")[2]
    if "gate_up_proj" in name and int(layer) % 2:
        gate, up = np.split(rows, 2, 1)
        return {f"blk.{layer}.ffn_gate_exps.weight": gate, f"blk.{layer}.ffn_up_exps.weight": up}
    ends = {"gate_up_proj": "ffn_gate_up_exps", "down_proj": "ffn_down_exps"}
    end = ends.get(name.rpartition(".")[2], "layer_output_scale")
    return {f"blk.{layer}.{end}.weight": rows}


def rearrange_llama4(name: str, rows: Array) -> dict[str, Array]:
    """Return the experts of a layer; `rows` is [num_experts, out, in]."""
    layer = name.split(".")[2]
    if "down_proj" in name:
        return {f"blk.{layer}.ffn_down_exps.weight": rows}
    gate, up = np.split(rows, 2, 1)
    return {f"blk.{layer}.ffn_gate_exps.weight": gate, f"blk.{layer}.ffn_up_exps.weight": up}


def split_groups(config: dict[str, Any], rows: Array) -> Array:
    heads = first(config, "n_head", "num_attention_heads")
    groups = heads if config["model_type"] != "falcon" else falcon_groups(config)
    size = rows.shape[0] // (heads + 2 * groups)
    grouped = rows.reshape(groups, heads // groups + 2, size, *rows.shape[1:])
    parts = (grouped[:, :-2], grouped[:, [-2]], grouped[:, [-1]])
    return np.concatenate([part.reshape(-1, *rows.shape[1:]) for part in parts])


def falcon_groups(config: dict[str, Any]) -> int:
    return int(config["num_kv_heads"]) if config["new_decoder_architecture"] else 1


def join_experts(stored: dict[str, tuple[Array, Type]]) -> dict[str, tuple[Array, Type]]:
    """Stack the experts of a layer, all with the type of the first, because a stack has one type."""
    result: dict[str, tuple[Array, Type]] = {}
    stacks: dict[str, dict[int, tuple[Array, Type]]] = {}
    for name, entry in stored.items():
        before, _, after = name.partition(".experts.")
        if not after:
            result[name] = entry
            continue
        number, _, rest = after.partition(".")
        stacks.setdefault(f"{before}.experts.{rest}", {})[int(number)] = entry
    for name, entries in stacks.items():
        kind = entries[0][1]
        parts = []
        for _, (codes, own) in sorted(entries.items()):
            assert own == kind, "experts of a layer have one type"
            parts.append(codes)
        result[name] = (np.stack(parts), kind)
    return result


def first(config: dict[str, Any], *keys: str) -> Any:
    return next(config[key] for key in keys if config.get(key) is not None)


def add_tokens(writer: gguf.GGUFWriter, size: int) -> None:
    tokens = ["a", "b", "ab", *(f"<{number}>" for number in range(3, size))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * size)
    writer.add_token_merges(["a b"])


def add_metadata(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    kind = config["model_type"]
    heads = 0 if kind == "mamba2" else first(config, "n_head", "num_attention_heads", "n_heads", "num_heads")
    width = first(config, "hidden_size", "n_embd", "d_model")
    writer.add_context_length(
        first({**config, "none": 512}, "max_position_embeddings", "n_positions", "none")
    )
    writer.add_embedding_length(width)
    count = first(config, "num_hidden_layers", "n_layer", "n_layers", "num_layers")
    writer.add_block_count(count + config.get("num_nextn_predict_layers", 0))
    writer.add_head_count(heads)
    writer.add_vocab_size(config["vocab_size"])
    if kind == "gemma4_text":
        add_gemma4(writer, config)
    elif kind != "mamba2":
        add_layers(writer, config, 4 * width)
        if "kv_lora_rank" in config:
            add_latents(writer, config)
        elif config.get("head_dim"):
            writer.add_key_length(config["head_dim"])
            writer.add_value_length(config["head_dim"])
        sizes = {**config, "none": width // heads}
        add_rope(writer, config, first(sizes, "qk_rope_head_dim", "head_dim", "none"))
    add_numbers(writer, config)
    add_own(writer, config)


def add_layers(writer: gguf.GGUFWriter, config: dict[str, Any], usual_width: int) -> None:
    """Add the widths and the heads of layers."""
    inner = config.get("intermediate_size") or config.get("d_ff") or config.get("n_inner")
    inner = inner or config.get("ffn_hidden_size") or usual_width
    heads = first(config, "n_head", "num_attention_heads", "n_heads", "num_heads")
    groups = falcon_groups(config) if config["model_type"] == "falcon" else config.get("num_key_value_heads")
    kinds = config.get("layers_block_type")
    if config["model_type"] == "llama4_text":
        inner = config["intermediate_size_mlp"]
    if config["model_type"] == "granitemoehybrid":
        kinds = config["layer_types"]
    if config["model_type"] == "nemotron_h":
        width = config["moe_intermediate_size"] if "moe" in kinds else inner
        writer.add_feed_forward_length([width if each in ("mlp", "moe") else 0 for each in kinds])
    else:
        writer.add_feed_forward_length(inner)
    if kinds is None:
        has_latents = "kv_lora_rank" in config and has_split_heads(config)
        writer.add_head_count_kv(1 if has_latents else groups or heads)
    else:
        writer.add_head_count_kv([groups if each in ("attention", "full_attention") else 0 for each in kinds])


def add_gemma4(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    kinds, shared = config["layer_types"], config["num_kv_shared_layers"]
    is_full = [kind == "full_attention" for kind in kinds]
    full, width = next(iter(config["per_layer_config"].values())), config["intermediate_size"]
    wide = width * 2 if config["use_double_wide_mlp"] else width
    writer.add_feed_forward_length([width if i < len(kinds) - shared else wide for i in range(len(kinds))])
    groups = config["num_key_value_heads"]
    writer.add_head_count_kv(
        [full.get("num_key_value_heads", groups) if each else groups for each in is_full]
    )
    writer.add_sliding_window_pattern([not each for each in is_full])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_shared_kv_layers(shared)
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
    for add, size in (
        (writer.add_key_length, full["head_dim"]),
        (writer.add_value_length, full["head_dim"]),
        (writer.add_key_length_swa, config["head_dim"]),
        (writer.add_value_length_swa, config["head_dim"]),
    ):
        add(size)
    rope = config["rope_parameters"]
    writer.add_rope_freq_base(rope["full_attention"]["rope_theta"])
    writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
    half = full["head_dim"] // 2
    rotated = int(half * rope["full_attention"]["partial_rotary_factor"])
    factors = np.array([1.0] * rotated + [1e30] * (half - rotated), np.float32)
    writer.add_tensor("rope_freqs.weight", factors)
    if config["enable_moe_block"]:
        writer.add_expert_used_count(config["top_k_experts"])


def add_latents(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    query, value = config["qk_nope_head_dim"] + config["qk_rope_head_dim"], config["v_head_dim"]
    writer.add_kv_lora_rank(config["kv_lora_rank"])
    if not has_split_heads(config):
        writer.add_key_length(query)
        writer.add_value_length(value)
        return
    writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_key_length(config["kv_lora_rank"] + config["qk_rope_head_dim"])
    writer.add_value_length(config["kv_lora_rank"])
    writer.add_key_length_mla(query)
    writer.add_value_length_mla(value)


def add_numbers(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    adders: dict[str, Callable[[Any], None]] = {
        "rms_norm_eps": writer.add_layer_norm_rms_eps,
        "layer_norm_eps": writer.add_layer_norm_eps,
        "layer_norm_epsilon": writer.add_layer_norm_eps,
        "norm_epsilon": writer.add_layer_norm_eps,
        "num_experts_per_tok": writer.add_expert_used_count,
        "num_local_experts": writer.add_expert_count,
        "num_experts": writer.add_expert_count,
        "moe_intermediate_size": writer.add_expert_feed_forward_length,
        "attn_logit_softcapping": writer.add_attn_logit_softcapping,
        "final_logit_softcapping": writer.add_final_logit_softcapping,
        "attention_multiplier": writer.add_attention_scale,
        "residual_multiplier": writer.add_residual_scale,
        "embedding_multiplier": writer.add_embedding_scale,
        "logits_scaling": writer.add_logit_scale,
        "use_parallel_residual": writer.add_parallel_residual,
        "relative_attention_num_buckets": writer.add_relative_attn_buckets_count,
        "decoder_start_token_id": writer.add_decoder_start_token_id,
        "num_decoder_layers": writer.add_decoder_block_count,
        "shared_expert_intermediate_size": writer.add_expert_shared_feed_forward_length,
        "n_routed_experts": writer.add_expert_count,
        "n_shared_experts": writer.add_expert_shared_count,
        "n_group": writer.add_expert_group_count,
        "topk_group": writer.add_expert_group_used_count,
        "first_k_dense_replace": writer.add_leading_dense_block_count,
        "routed_scaling_factor": writer.add_expert_weights_scale,
    }
    for key, add in adders.items():
        if config.get(key) is not None:
            add(config[key])


def add_own(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    kind = config["model_type"]
    if kind in ("gemma2", "gemma3_text", "phi3", "starcoder2", "olmo3", "gpt_oss"):
        writer.add_sliding_window(config.get("sliding_window") or 0)
    if kind == "granitemoehybrid":
        writer.add_rope_scaling_finetuned(config["position_embedding_type"] == "rope")
        writer.add_ssm_conv_kernel(config["mamba_d_conv"])
        writer.add_ssm_state_size(config["mamba_d_state"])
        writer.add_ssm_group_count(config["mamba_n_groups"])
        writer.add_ssm_inner_size(config["mamba_expand"] * config["hidden_size"])
        writer.add_ssm_time_step_rank(config["mamba_n_heads"])
    if kind == "falcon_h1":
        writer.add_ssm_conv_kernel(config["mamba_d_conv"])
        writer.add_ssm_state_size(config["mamba_d_state"])
        writer.add_ssm_group_count(config["mamba_n_groups"])
        writer.add_ssm_inner_size(config["mamba_d_ssm"])
        writer.add_ssm_time_step_rank(config["mamba_n_heads"])
    if kind in ("mamba2", "nemotron_h"):
        heads = first(config, "mamba_num_heads", "num_heads")
        writer.add_ssm_conv_kernel(config["conv_kernel"])
        writer.add_ssm_state_size(first(config, "ssm_state_size", "state_size"))
        writer.add_ssm_group_count(config["n_groups"])
        writer.add_ssm_inner_size(heads * (config.get("mamba_head_dim") or config["head_dim"]))
        writer.add_ssm_time_step_rank(heads)
        writer.add_layer_norm_rms_eps(config["layer_norm_epsilon"])
    if kind == "nemotron_h" and "moe" in config["layers_block_type"]:
        writer.add_expert_weights_norm(config["norm_topk_prob"])
        writer.add_expert_shared_feed_forward_length(config["moe_shared_expert_intermediate_size"])
        if config.get("moe_latent_size"):
            writer.add_moe_latent_size(config["moe_latent_size"])
    if kind == "deepseek_v3":
        writer.add_expert_weights_norm(config["norm_topk_prob"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if kind == "qwen3_next":
        writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
        writer.add_ssm_state_size(config["linear_key_head_dim"])
        writer.add_ssm_group_count(config["linear_num_key_heads"])
        writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
        writer.add_ssm_inner_size(config["linear_value_head_dim"] * config["linear_num_value_heads"])
        writer.add_full_attention_interval(config["layer_types"].index("full_attention") + 1)
    if kind == "llama4_text":
        writer.add_interleave_moe_layer_step(config["interleave_moe_layer_step"])
        writer.add_expert_feed_forward_length(config["intermediate_size"])
    if kind == "glm4_moe":
        writer.add_expert_weights_norm(config["norm_topk_prob"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_nextn_predict_layers(config["num_nextn_predict_layers"])
    if kind == "t5":
        writer.add_key_length(config["d_kv"])
        writer.add_value_length(config["d_kv"])
        writer.add_layer_norm_rms_eps(config["layer_norm_epsilon"])
    if kind == "mpt":
        attention = config["attn_config"]
        writer.add_max_alibi_bias(float(attention["alibi_bias_max"]))
        if attention["clip_qkv"]:
            writer.add_clamp_kqv(attention["clip_qkv"])


def add_rope(writer: gguf.GGUFWriter, config: dict[str, Any], head_dim: int) -> None:
    given = config.get("rope_parameters") or {}
    local = given.get("sliding_attention")
    given = given.get("full_attention", given)
    if not given:
        return
    writer.add_rope_freq_base(given["rope_theta"])
    if local is not None and config["model_type"] != "olmo3":
        assert local["rope_theta"] == 10000.0, "the file does not say it"
    if config["model_type"] not in ("gemma3_text", "gemma2", "gemma"):
        writer.add_rope_dimension_count(int(head_dim * (given.get("partial_rotary_factor") or 1.0)))
    kind = given.get("rope_type", "default")
    if kind in ("linear", "yarn"):
        names = {"linear": gguf.RopeScalingType.LINEAR, "yarn": gguf.RopeScalingType.YARN}
        writer.add_rope_scaling_type(names[kind])
        writer.add_rope_scaling_factor(given["factor"])
    if kind == "yarn" and "kv_lora_rank" in config:
        writer.add_rope_scaling_yarn_log_mul(0.1 * given["mscale_all_dim"])
    if kind == "yarn" and config["model_type"] == "ministral3":
        if beta := given.get("llama_4_scaling_beta"):
            writer.add_attn_temperature_scale(beta)
        if share := given.get("mscale_all_dim"):
            writer.add_rope_scaling_yarn_log_mul(share)
    if kind in ("yarn", "longrope"):
        writer.add_rope_scaling_orig_ctx_len(given["original_max_position_embeddings"])


def add_draft_layers(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Add some of the tensors of layers that only predict further tokens."""
    count = first(config, "num_hidden_layers", "n_layer", "n_layers", "num_layers")
    for layer in range(count, count + config.get("num_nextn_predict_layers", 0)):
        for module in ("attn_norm", "nextn.enorm"):
            writer.add_tensor(f"blk.{layer}.{module}.weight", np.ones(config["hidden_size"], np.float32))


def add_rope_factors(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    given = config.get("rope_parameters") or {}
    if given.get("rope_type") == "longrope":
        for size in ("long", "short"):
            factors = np.array(given[f"{size}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{size}.weight", factors)
    if given.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_factors(given, config["head_dim"]))


def llama3_factors(given: dict[str, Any], dim: int) -> Array:
    """Return the factors like llama.cpp's script."""
    frequencies = 1.0 / (given["rope_theta"] ** (np.arange(0, dim, 2) / dim))
    low, high, factor = given["low_freq_factor"], given["high_freq_factor"], given["factor"]
    length, factors = given["original_max_position_embeddings"], []
    for wavelength in 2 * np.pi / frequencies:
        if wavelength < length / high:
            factors.append(1.0)
        elif wavelength > length / low:
            factors.append(factor)
        else:
            smooth = (length / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)
