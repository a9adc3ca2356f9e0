"""Maps the names of each architecture's tensors in GGUF files to the names in checkpoints."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from tgis.convert.atomic_write import ConversionError
from tgis.convert.gguf.files import GgufFiles
from tgis.convert.gguf.row_order import AdjacentPairs, RowOrder, SplitGroups

LAYER = "blk.{i}."
# Tensors that become part of the configuration.
ROPE_FREQUENCIES, ROPE_LONG, ROPE_SHORT = "rope_freqs", "rope_factors_long", "rope_factors_short"
IN_CONFIGURATION = tuple(f"{name}.weight" for name in (ROPE_FREQUENCIES, ROPE_LONG, ROPE_SHORT))
_EXPERTS = re.compile(r"_exps$")
_LAYER_NUMBER = re.compile(r"^blk\.\d+\.")


class StoredForm(Enum):
    """Form of a small tensor that differs from the one in the checkpoint."""

    VECTOR_IN_ROWS = "rows"
    """Vector that is stored as a matrix."""
    DECAY = "decay"
    """Negative exponentials of a vector, in rows."""
    KERNEL = "kernel"
    """Kernel of a convolution by channels, without the axis of size 1."""
    EXPERTS = "experts"
    """Matrices of all experts, which are transposed in the checkpoint, or their biases."""
    INTERLEAVED_EXPERTS = "interleaved experts"
    """Two of `EXPERTS`, whose rows alternate in the checkpoint."""
    LATENT_HEADS = "latent heads"
    """Transposed matrices of all heads' keys, and matrices of their values. In the checkpoint, the rows of a
    head's values follow those of its keys."""
    KEY_GROUPS = "key groups"
    """Queries, keys and values of all heads, and the gates. In the checkpoint, the rows of a key head and of
    the value heads that share it are adjacent."""
    ROW = "row"
    """Matrix of one row, which may be stored as a vector."""


@dataclass(frozen=True)
class GgufSource:
    """Tensors of the file that contain one tensor of a checkpoint; the rows of several tensors are joined."""

    names: tuple[str, ...]
    entry: int | None = None
    order: RowOrder | None = None
    added: float = 0.0
    """Number added to all elements in the file."""
    is_transposed: bool = False
    form: StoredForm | None = None


@dataclass(frozen=True)
class TensorNames:
    """Modules of a checkpoint by modules of the file, with {i} for the layer and {e} for the expert.

    If several modules of the file are joined, they have the same target, in order."""

    modules: Mapping[str, str]
    pairs: tuple[str, ...] = ()
    """Modules whose rows are in the order AdjacentPairs."""
    groups: str = ""
    """Module whose rows are in the order SplitGroups."""
    norms_added: float = 0.0
    """Number added to the weights of norms in the file."""
    transposed: tuple[str, ...] = ()
    parameters: Mapping[str, str] = field(default_factory=dict)
    """Tensors of a checkpoint whose last part differs, by tensors of the file."""
    forms: Mapping[str, StoredForm] = field(default_factory=dict)
    """Forms of tensors of the file."""


def list_sources(files: GgufFiles, names: TensorNames) -> dict[str, GgufSource]:
    """Return how each tensor of a checkpoint is stored.

    Tensors missing in `names` keep the file's names, so that the reader of the checkpoint reports them."""
    sources: dict[str, GgufSource] = {}
    order = {key: number for number, key in enumerate((*names.modules, *names.parameters))}

    def find_place(name: str) -> int:
        return order.get(_split(name)[0], order.get(_without_number(name), 0))

    for name in sorted(files.tensors, key=find_place):
        key, layer, expert, end = _split(name)
        if name in IN_CONFIGURATION or _is_draft(files, layer):
            continue
        if full := names.parameters.get(_without_number(name)):
            _add(sources, full.format(i=layer), _make_source(files, names, key, name))
            continue
        if key not in names.modules:
            sources[name] = GgufSource((name,))
            continue
        target = names.modules[key]
        source = _make_source(files, names, key, name)
        if _EXPERTS.search(key) and "{e}" in target:
            for entry in range(files.tensors[name].place.shape[0]):
                sources[f"{target.format(i=layer, e=entry)}.{end}"] = replace(source, entry=entry)
        else:
            _add(sources, f"{target.format(i=layer, e=expert)}.{end}", source)
    return sources


def _add(sources: dict[str, GgufSource], name: str, source: GgufSource) -> None:
    """Add a source of a tensor after those that contain its first rows."""
    first = sources.get(name)
    sources[name] = replace(first, names=(*first.names, *source.names)) if first else source


def refuse_unknown(files: GgufFiles, names: TensorNames) -> None:
    """Raise ConversionError for a tensor that the architecture does not have.

    Without this tensor, the model would differ from the trained one."""
    unknown = [
        name for name in files.tensors if name not in IN_CONFIGURATION and _is_unknown(files, names, name)
    ]
    if unknown:
        path = files.tensors[unknown[0]].path
        architecture = files.metadata.architecture
        raise ConversionError(
            f"{path}: the architecture {architecture} has no place for "
            f"{len(unknown)} of the tensors, the first of which is {unknown[0]}"
        )


def _is_unknown(files: GgufFiles, names: TensorNames, name: str) -> bool:
    key, layer, *_ = _split(name)
    is_known = key in names.modules or _without_number(name) in names.parameters
    return not is_known and not _is_draft(files, layer)


def _is_draft(files: GgufFiles, layer: str) -> bool:
    """Return True for a layer after the model's own ones, which only predicts further tokens."""
    has_drafts = files.metadata.integer(".nextn_predict_layers", 0) > 0
    return has_drafts and bool(layer) and int(layer) >= count_layers(files)


def count_layers(files: GgufFiles) -> int:
    """Return the number of layers without those that predict further tokens."""
    metadata = files.metadata
    return metadata.integer(".block_count") - metadata.integer(".nextn_predict_layers", 0)


def _without_number(name: str) -> str:
    """Return a tensor's name with {i} in place of the layer."""
    return _LAYER_NUMBER.sub(LAYER, name)


def _split(name: str) -> tuple[str, str, str, str]:
    """Split a tensor's name into module, layer, expert and last part.

    The module has {i} in place of the layer, and {e} in place of an expert with a separate tensor."""
    module, _, end = name.rpartition(".")
    layer, expert, *_ = (*(part for part in module.split(".") if part.isdigit()), "", "")
    key = module.replace(f".{layer}.", ".{i}.", 1) if layer else module
    return (f"{key.rpartition('.')[0]}.{{e}}" if expert else key), layer, expert, end


def _make_source(files: GgufFiles, names: TensorNames, key: str, name: str) -> GgufSource:
    if not names.pairs and not names.groups:  # the numbers of heads may differ between layers
        return make_source(names, key, name, 0, 0)
    num_heads = files.metadata.integer(".attention.head_count")
    return make_source(names, key, name, num_heads, count_groups(files, num_heads))


def count_groups(files: GgufFiles, num_heads: int) -> int:
    """Return the number of key heads of layers with attention."""
    if ".ssm.state_size" in files.metadata and ".attention.head_count_kv" in files.metadata:
        return max(list_groups(files), default=0)
    return files.metadata.integer(".attention.head_count_kv", num_heads)


def list_groups(files: GgufFiles) -> list[int]:
    """Return the numbers of key heads by layer, which are 0 for layers without attention."""
    return files.metadata.layer_integers(".attention.head_count_kv", count_layers(files))


def make_source(names: TensorNames, key: str, name: str, num_heads: int, num_groups: int) -> GgufSource:
    """Return how the tensor `name` of the module `key` is stored, given the numbers of query and key
    heads."""
    order: RowOrder | None = None
    if key in names.pairs:
        order = AdjacentPairs(num_groups if key.endswith("_k") else num_heads)
    elif key == names.groups:
        order = SplitGroups(num_heads, num_groups)
    is_norm = name.endswith("norm.weight") and not name.endswith("ssm_norm.weight")
    added = names.norms_added if is_norm else 0.0
    form = names.forms.get(_without_number(name))
    return GgufSource((name,), None, order, added, key in names.transposed, form)


def _layers(target: str, **modules: str) -> Iterator[tuple[str, str]]:
    for theirs, ours in modules.items():
        yield LAYER + theirs, target + ours


def _shared_experts(target: str) -> dict[str, str]:
    return {f"ffn_{x}_shexp": f"{target}{x}_proj" for x in ("gate", "up", "down")}


_L, _H = "model.layers.{i}.", "transformer.h.{i}."
_ATTENTION = {f"attn_{x}": f"self_attn.{x}_proj" for x in "qkv"} | {"attn_output": "self_attn.o_proj"}
_HEAD_NORMS = {f"attn_{x}_norm": f"self_attn.{x}_norm" for x in "qk"}
_MLP = {f"ffn_{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")}
_TABLES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_POST_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_PAIRS = (LAYER + "attn_q", LAYER + "attn_k")

_plain = _TABLES | dict(_layers(_L, **_ATTENTION, **_NORMS, **_MLP))
_sparse = "block_sparse_moe."
_mixtral = {"gate": "w1", "up": "w3", "down": "w2"}
_mixtral_layers = {"ffn_gate_inp": _sparse + "gate"}
for _theirs, _ours in _mixtral.items():
    _mixtral_layers[f"ffn_{_theirs}_exps"] = _mixtral_layers[f"ffn_{_theirs}.{{e}}"] = (
        _sparse + "experts.{e}." + _ours
    )
_gemma2 = _plain | dict(_layers(_L, ffn_norm="pre_feedforward_layernorm", **_POST_NORMS))

LLAMA = TensorNames(_plain, _PAIRS)
MIXTRAL = TensorNames(_plain | dict(_layers(_L, **_mixtral_layers)), _PAIRS)
QWEN2 = TensorNames(_plain)
QWEN3 = TensorNames(_plain | dict(_layers(_L, **_HEAD_NORMS)))
QWEN3_MOE = TensorNames(
    {**QWEN3.modules}
    | dict(
        _layers(
            _L,
            ffn_gate_inp="mlp.gate",
            **{f"ffn_{x}_exps": f"mlp.experts.{{e}}.{x}_proj" for x in ("gate", "up", "down")},
        )
    )
)
_gated_expert = {"ffn_gate_inp_shexp": "mlp.shared_expert_gate", **_shared_experts("mlp.shared_expert.")}
_GATE_FORM = {LAYER + "ffn_gate_inp_shexp.weight": StoredForm.ROW}
QWEN2_MOE = TensorNames(
    {**QWEN3_MOE.modules} | dict(_layers(_L, **_gated_expert)),
    forms=_GATE_FORM,
)
GLM4_MOE = TensorNames(
    {**QWEN3_MOE.modules}
    | dict(
        _layers(
            _L,
            post_attention_norm="post_attention_layernorm",
            **_shared_experts("mlp.shared_experts."),
        )
    ),
    parameters={LAYER + "exp_probs_b.bias": _L + "mlp.gate.e_score_correction_bias"},
)
DEEPSEEK2 = TensorNames(
    {**GLM4_MOE.modules}
    | dict(
        _layers(
            _L,
            ffn_norm="post_attention_layernorm",
            attn_q_a="self_attn.q_a_proj",
            attn_q_a_norm="self_attn.q_a_layernorm",
            attn_q_b="self_attn.q_b_proj",
            attn_kv_a_mqa="self_attn.kv_a_proj_with_mqa",
            attn_kv_a_norm="self_attn.kv_a_layernorm",
            attn_k_b="self_attn.kv_b_proj",
            attn_v_b="self_attn.kv_b_proj",
            attn_kv_b="self_attn.kv_b_proj",  # of older files, which have no other
        )
    ),
    parameters=GLM4_MOE.parameters,
    forms={LAYER + "attn_k_b.weight": StoredForm.LATENT_HEADS},
)
GEMMA = TensorNames(_plain, norms_added=1.0)
GEMMA2 = TensorNames(_gemma2, norms_added=1.0)
GEMMA3 = TensorNames(_gemma2 | dict(_layers(_L, **_HEAD_NORMS)), norms_added=1.0)
_router, _experts = _L + "router.", _L + "experts."
GEMMA4 = TensorNames(
    {
        **GEMMA3.modules,
        "per_layer_token_embd": "model.embed_tokens_per_layer",
        "per_layer_model_proj": "model.per_layer_model_projection",
        "per_layer_proj_norm": "model.per_layer_projection_norm",
        **dict(
            _layers(
                _L,
                inp_gate="per_layer_input_gate",
                proj="per_layer_projection",
                post_norm="post_per_layer_input_norm",
                post_ffw_norm_1="post_feedforward_layernorm_1",
                pre_ffw_norm_2="pre_feedforward_layernorm_2",
                post_ffw_norm_2="post_feedforward_layernorm_2",
                ffn_gate_inp="router.proj",
            )
        ),
    },
    parameters={
        LAYER + "layer_output_scale.weight": _L + "layer_scalar",
        LAYER + "ffn_gate_inp.scale": _router + "scale",
        LAYER + "ffn_gate_up_exps.weight": _experts + "gate_up_proj",
        LAYER + "ffn_gate_exps.weight": _experts + "gate_up_proj",  # of files that have these two instead
        LAYER + "ffn_up_exps.weight": _experts + "gate_up_proj",
        LAYER + "ffn_down_exps.weight": _experts + "down_proj",
        LAYER + "ffn_down_exps.scale": _router + "per_expert_scale",
    },
)
PHI3 = TensorNames(_plain | dict(_layers(_L, attn_qkv="self_attn.qkv_proj", ffn_up="mlp.gate_up_proj")))
GRANITE_MOE = TensorNames(
    _plain
    | dict(
        _layers(
            _L,
            ffn_gate_inp=_sparse + "router.layer",
            ffn_gate_exps=_sparse + "input_linear",
            ffn_up_exps=_sparse + "input_linear",
            ffn_down_exps=_sparse + "output_linear",
        )
    ),
    _PAIRS,
)
_shared_mlp = {
    "gate": "shared_mlp.input_linear",
    "up": "shared_mlp.input_linear",
    "down": "shared_mlp.output_linear",
}
_MAMBA_FORMS = {
    LAYER + "ssm_a": StoredForm.DECAY,
    LAYER + "ssm_d": StoredForm.VECTOR_IN_ROWS,
    LAYER + "ssm_norm.weight": StoredForm.VECTOR_IN_ROWS,
    LAYER + "ssm_conv1d.weight": StoredForm.KERNEL,
}


def _mamba_modules(mixer: str) -> dict[str, str]:
    """Return the modules of a Mamba layer. `mixer` begins the names in the checkpoint."""
    modules = {"in": "in_proj", "conv1d": "conv1d", "norm": "norm", "out": "out_proj"}
    return {f"{LAYER}ssm_{theirs}": mixer + ours for theirs, ours in modules.items()}


def _mamba_parameters(mixer: str) -> dict[str, str]:
    vectors = {"a": "A_log", "d": "D", "dt.bias": "dt_bias"}
    return {f"{LAYER}ssm_{theirs}": mixer + ours for theirs, ours in vectors.items()}


GRANITE_HYBRID = TensorNames(
    {**GRANITE_MOE.modules, **_mamba_modules(_L + "mamba.")}
    | dict(
        _layers(
            _L, **{f"ffn_{x}{end}": module for x, module in _shared_mlp.items() for end in ("", "_shexp")}
        )
    ),
    _PAIRS,
    parameters=_mamba_parameters(_L + "mamba."),
    forms=_MAMBA_FORMS,
)
FALCON_H1 = TensorNames(
    {
        **_TABLES,
        "output_norm": "model.final_layernorm",
        **_mamba_modules(_L + "mamba."),
        **dict(
            _layers(
                _L,
                **_ATTENTION,
                attn_norm="input_layernorm",
                ffn_norm="pre_ff_layernorm",
                **{f"ffn_{x}": f"feed_forward.{x}_proj" for x in ("gate", "up", "down")},
            )
        ),
    },
    # llama.cpp's script leaves `.weight` out of this name.
    parameters={**_mamba_parameters(_L + "mamba."), LAYER + "ffn_norm": _L + "pre_ff_layernorm.weight"},
    forms=_MAMBA_FORMS,
)
_delta = _L + "linear_attn."
QWEN3_NEXT = TensorNames(
    {
        **QWEN3_MOE.modules,
        **_mamba_modules(_delta),
        **dict(
            _layers(
                _L,
                **_gated_expert,
                post_attention_norm="post_attention_layernorm",
                attn_qkv="linear_attn.in_proj_qkvz",
                attn_gate="linear_attn.in_proj_qkvz",
                ssm_in="linear_attn.in_proj_qkvz",  # of older files, which have no other
                ssm_ba="linear_attn.in_proj_ba",
            )
        ),
    },
    norms_added=1.0,
    parameters={LAYER + "ssm_a": _delta + "A_log", LAYER + "ssm_dt.bias": _delta + "dt_bias"},
    forms={
        **_GATE_FORM,
        LAYER + "ssm_a": StoredForm.DECAY,
        LAYER + "ssm_conv1d.weight": StoredForm.KERNEL,
        LAYER + "attn_qkv.weight": StoredForm.KEY_GROUPS,
    },
)
_B = "backbone.layers.{i}."
MAMBA2 = TensorNames(
    {
        "token_embd": "backbone.embeddings",
        "output_norm": "backbone.norm_f",
        "output": "lm_head",
        LAYER + "attn_norm": _B + "norm",
        **_mamba_modules(_B + "mixer."),
    },
    parameters=_mamba_parameters(_B + "mixer."),
    forms=_MAMBA_FORMS,
)
# Queries and keys of all heads are in one other order, which has no effect without a rotary embedding.
NEMOTRON_H = TensorNames(
    {
        **MAMBA2.modules,
        **dict(
            _layers(
                _B + "mixer.",
                **{f"attn_{x}": f"{x}_proj" for x in "qkv"},
                attn_output="o_proj",
                ffn_up="up_proj",
                ffn_down="down_proj",
                ffn_gate_inp="gate",
                ffn_up_exps="experts.{e}.up_proj",
                ffn_down_exps="experts.{e}.down_proj",
                ffn_up_shexp="shared_experts.up_proj",
                ffn_down_shexp="shared_experts.down_proj",
                ffn_latent_down="fc1_latent_proj",
                ffn_latent_up="fc2_latent_proj",
            )
        ),
    },
    parameters={**MAMBA2.parameters, LAYER + "exp_probs_b.bias": _B + "mixer.gate.e_score_correction_bias"},
    forms=_MAMBA_FORMS,
)
_oss_experts = {"gate": "gate_up_proj", "up": "gate_up_proj", "down": "down_proj"}
_oss_ends = {"weight": "", "bias": "_bias"}
_oss_names = {
    f"{LAYER}ffn_{x}_exps.{end}": f"{_L}mlp.experts.{module}{suffix}"
    for x, module in _oss_experts.items()
    for end, suffix in _oss_ends.items()
}
GPT_OSS = TensorNames(
    _TABLES
    | dict(
        _layers(
            _L,
            **_ATTENTION,
            attn_norm="input_layernorm",
            post_attention_norm="post_attention_layernorm",
            ffn_gate_inp="mlp.router",
        )
    ),
    parameters={LAYER + "attn_sinks.weight": _L + "self_attn.sinks", **_oss_names},
    forms={
        name: StoredForm.EXPERTS if "down" in name else StoredForm.INTERLEAVED_EXPERTS for name in _oss_names
    },
)
LLAMA4 = TensorNames(
    _plain
    | dict(
        _layers(
            _L,
            ffn_gate_inp="feed_forward.router",
            **{f"ffn_{x}": f"feed_forward.{x}_proj" for x in ("gate", "up", "down")},
            **{f"ffn_{x}_exps": f"feed_forward.experts.{{e}}.{x}_proj" for x in ("gate", "up", "down")},
            **_shared_experts("feed_forward.shared_expert."),
        )
    )
)
OLMO2 = TensorNames(_TABLES | dict(_layers(_L, **_ATTENTION, **_HEAD_NORMS, **_POST_NORMS, **_MLP)))
STARCODER2 = TensorNames(_plain | dict(_layers(_L, ffn_up="mlp.c_fc", ffn_down="mlp.c_proj")))
GPT_NEOX = TensorNames(
    {
        "token_embd": "gpt_neox.embed_in",
        "output_norm": "gpt_neox.final_layer_norm",
        "output": "embed_out",
        **dict(
            _layers(
                "gpt_neox.layers.{i}.",
                attn_norm="input_layernorm",
                ffn_norm="post_attention_layernorm",
                attn_qkv="attention.query_key_value",
                attn_output="attention.dense",
                ffn_up="mlp.dense_h_to_4h",
                ffn_down="mlp.dense_4h_to_h",
            )
        ),
    },
    groups=LAYER + "attn_qkv",
)
GPT2 = TensorNames(
    {
        "token_embd": "transformer.wte",
        "position_embd": "transformer.wpe",
        "output_norm": "transformer.ln_f",
        "output": "lm_head",
        **dict(
            _layers(
                _H,
                attn_norm="ln_1",
                ffn_norm="ln_2",
                attn_qkv="attn.c_attn",
                attn_output="attn.c_proj",
                ffn_up="mlp.c_fc",
                ffn_down="mlp.c_proj",
            )
        ),
    },
    transposed=tuple(LAYER + x for x in ("attn_qkv", "attn_output", "ffn_up", "ffn_down")),
)
BLOOM = TensorNames(
    {
        "token_embd": "transformer.word_embeddings",
        "token_embd_norm": "transformer.word_embeddings_layernorm",
        "output_norm": "transformer.ln_f",
        "output": "lm_head",
        **dict(
            _layers(
                _H,
                attn_norm="input_layernorm",
                ffn_norm="post_attention_layernorm",
                attn_qkv="self_attention.query_key_value",
                attn_output="self_attention.dense",
                ffn_up="mlp.dense_h_to_4h",
                ffn_down="mlp.dense_4h_to_h",
            )
        ),
    },
    groups=LAYER + "attn_qkv",
)
FALCON = TensorNames(BLOOM.modules, groups=BLOOM.groups)
FALCON_TWO_NORMS = TensorNames(
    {**BLOOM.modules, **dict(_layers(_H, attn_norm="ln_mlp", attn_norm_2="ln_attn"))}, groups=BLOOM.groups
)
MPT = TensorNames(
    {
        "token_embd": "transformer.wte",
        "output_norm": "transformer.norm_f",
        "output": "lm_head",
        **dict(
            _layers(
                "transformer.blocks.{i}.",
                attn_norm="norm_1",
                ffn_norm="norm_2",
                attn_qkv="attn.Wqkv",
                attn_output="attn.out_proj",
                ffn_up="ffn.up_proj",
                ffn_down="ffn.down_proj",
            )
        ),
    }
)


def _t5_stack(short: str, long: str, feed: int, gates: bool) -> dict[str, str]:
    ours, theirs = long + ".block.{i}.layer.", short + ".blk.{i}."
    modules = {f"attn_{x}": f"0.SelfAttention.{x}" for x in "qkvo"}
    modules |= {"attn_rel_b": "0.SelfAttention.relative_attention_bias", "attn_norm": "0.layer_norm"}
    modules |= {"ffn_norm": f"{feed}.layer_norm", "ffn_down": f"{feed}.DenseReluDense.wo"}
    modules |= {"ffn_up": f"{feed}.DenseReluDense.{'wi_1' if gates else 'wi'}"}
    modules |= {"ffn_gate": f"{feed}.DenseReluDense.wi_0"}
    if feed == 2:
        modules |= {f"cross_attn_{x}": f"1.EncDecAttention.{x}" for x in "qkvo"}
        modules |= {
            "cross_attn_norm": "1.layer_norm",
            "cross_attn_rel_b": "1.EncDecAttention.relative_attention_bias",
        }
    names = {theirs + name: ours + target for name, target in modules.items()}
    return names | {f"{short}.output_norm": f"{long}.final_layer_norm"}


def t5_names(has_gates: bool) -> TensorNames:
    tables = {"token_embd": "shared", "output": "lm_head"}
    encoder, decoder = _t5_stack("enc", "encoder", 1, has_gates), _t5_stack("dec", "decoder", 2, has_gates)
    return TensorNames(tables | encoder | decoder)
