"""Gemma 4, also the text part of multimodal checkpoints: Gemma 3 with other heads in layers with full
attention, last layers that read the keys and values of earlier ones, a second embedding of tokens with a
vector per layer, and experts beside an MLP."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tgis.shard.checkpoint.weights import Source, by_layer, expert, stack
from tgis.shard.models.config_reader import (
    Config,
    count,
    integer,
    optional_number,
    refuse_others,
    refuse_partial_rope,
    rope,
)
from tgis.shard.models.families import gemma3, llama, mixtral
from tgis.shard.models.interface import ConfigurationError, UnsupportedModelError
from tgis.shard.models.parts.sliding_window import FULL, SLIDING, layer_windows
from tgis.shard.models.spec import DecoderSpec, Experts, KVProjections, LayerInputs, LayerShape

MODEL_TYPES: tuple[str, ...] = ("gemma4", "gemma4_text")
PREFIX = "language_model."

PERIOD = 6  # of layers with full attention
ROPES = {
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
# Values that a configuration may leave out.
DEFAULTS = {
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window": 512,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262144,
    "pad_token_id": 0,
}


def spec(config: Config) -> DecoderSpec:
    given = gemma3.read_text_config(config)
    config = {**DEFAULTS, **{key: value for key, value in given.items() if value is not None}}
    refuse_others(config, use_bidirectional_attention="vision")
    config = {**config, "rope_parameters": config.get("rope_parameters") or ROPES}
    refuse_partial_rope(config)
    shared = llama.spec({**config, "hidden_act": config.get("hidden_activation") or "gelu_pytorch_tanh"})
    kinds = _layer_kinds(config, shared.num_layers)
    sources = _kv_sources(config, kinds)
    shapes = _layer_shapes(config, shared, kinds, sources)
    return replace(
        shared,
        norm_place="both",
        qk_norm="head",
        value_norm=True,
        attention_scale=1.0,
        embedding_scale=shared.hidden_size**0.5,
        logit_soft_cap=optional_number(config, "final_logit_softcapping"),
        windows=layer_windows({**config, "layer_types": kinds}, [False] * shared.num_layers),
        rope=rope(config, _head_dim(shapes, kinds, FULL), FULL),
        local_rope=rope(config, _head_dim(shapes, kinds, SLIDING), SLIDING) if SLIDING in kinds else None,
        layer_shapes=shapes,
        kv_sources=sources,
        layer_inputs=_layer_inputs(config, shared.vocab_size),
        layer_scalars=True,
        experts=_experts(config) if config.get("enable_moe_block") else None,
    )


def sources(spec: DecoderSpec) -> dict[str, Source]:
    layer = "model.layers.{i}."
    attention, experts = layer + "self_attn.", layer + "experts."
    return {
        **llama.sources(spec),
        "layer_inputs.embed": "model.embed_tokens_per_layer",
        "layer_inputs.project": "model.per_layer_model_projection",
        "layer_inputs.norm": "model.per_layer_projection_norm",
        "blocks.{i}.attention.qkv": by_layer(lambda i: _projections(spec.layer_shapes[i].kv_projections)),
        "blocks.{i}.attention.q_norm": attention + "q_norm",
        "blocks.{i}.attention.k_norm": attention + "k_norm",
        "blocks.{i}.post_norm_1": layer + "post_attention_layernorm",
        "blocks.{i}.norm_2": layer + "pre_feedforward_layernorm",
        "blocks.{i}.post_norm_2": layer + "post_feedforward_layernorm",
        "blocks.{i}.mlp.dense_post_norm": layer + "post_feedforward_layernorm_1",
        "blocks.{i}.mlp.sparse_norm": layer + "pre_feedforward_layernorm_2",
        "blocks.{i}.mlp.sparse_post_norm": layer + "post_feedforward_layernorm_2",
        "blocks.{i}.mlp.router": layer + "router.proj",
        "blocks.{i}.mlp.choice": layer + "router",
        "blocks.{i}.mlp.experts.{e}.up": expert(experts + "gate_up_proj"),
        "blocks.{i}.mlp.experts.{e}.down": expert(experts + "down_proj"),
        "blocks.{i}.input_gate": layer + "per_layer_input_gate",
        "blocks.{i}.input_project": layer + "per_layer_projection",
        "blocks.{i}.input_norm": layer + "post_per_layer_input_norm",
        "blocks.{i}.output": "model.layers.{i}",
    }


def _projections(kinds: KVProjections) -> Source:
    names = {"both": "qkv", "keys": "qk", "none": "q"}[kinds]
    return stack(*(f"model.layers.{{i}}.self_attn.{x}_proj" for x in names))


def _layer_kinds(config: Config, num_layers: int) -> list[str]:
    kinds = config.get("layer_types")
    if kinds is None:
        kinds = [FULL if (i + 1) % PERIOD == 0 else SLIDING for i in range(num_layers)]
    is_list = isinstance(kinds, list) and all(each in (FULL, SLIDING) for each in kinds)
    if not is_list or len(kinds) != num_layers:
        expected = f"{num_layers} of {FULL} or {SLIDING}"
        raise UnsupportedModelError(f"layer types {kinds!r} are not supported, expected {expected}")
    return [*kinds[:-1], FULL]  # the last layer always has full attention


def _kv_sources(config: Config, kinds: Sequence[str]) -> tuple[int, ...]:
    """Return the layer whose keys and values each layer reads: its own, or the last one of its kind that has
    its own."""
    num_own = len(kinds) - count(config, "num_kv_shared_layers", 0)
    own = list(range(max(0, num_own)))
    last = {kinds[layer]: layer for layer in own}
    if not {*kinds} <= last.keys():
        raise ConfigurationError(f"num_kv_shared_layers leaves no layer of each kind in {sorted({*kinds})}")
    return (*own, *(last[kind] for kind in kinds[num_own:]))


def _layer_shapes(
    config: Config, shared: DecoderSpec, kinds: Sequence[str], sources: Sequence[int]
) -> tuple[LayerShape, ...]:
    heads = _layer_heads(config, shared, kinds)
    wide = 2 if config.get("use_double_wide_mlp") else 1
    shapes = []
    for layer, source in enumerate(sources):
        is_own = source == layer
        values_are_keys = config.get("attention_k_eq_v") and kinds[layer] == FULL
        projections: KVProjections = ("keys" if values_are_keys else "both") if is_own else "none"
        size = shared.intermediate_size * (1 if is_own else wide)
        shapes.append(LayerShape(*heads[layer], size, projections))
    if any(heads[layer] != heads[source] for layer, source in enumerate(sources)):
        raise UnsupportedModelError("layers that share keys and values have different heads")
    if any(shared.num_heads % num_kv_heads for num_kv_heads, _ in heads):
        raise UnsupportedModelError("attention heads cannot share the key/value heads of every layer")
    return tuple(shapes)


def _layer_heads(config: Config, shared: DecoderSpec, kinds: Sequence[str]) -> list[tuple[int, int]]:
    """Return the number of key/value heads and the head size of each layer."""
    given = config.get("per_layer_config")
    if given is None:
        full: dict[str, object] = {"head_dim": integer(config, "global_head_dim", 512)}
        if config.get("attention_k_eq_v"):
            full["num_key_value_heads"] = config.get("num_global_key_value_heads")
        given = {str(layer): full for layer, kind in enumerate(kinds) if kind == FULL}
    if not isinstance(given, Mapping) or not all(isinstance(each, Mapping) for each in given.values()):
        raise UnsupportedModelError(f"per_layer_config {given!r} of the configuration is not supported")
    # transformers writes all numbers of layers with equally many digits.
    overrides = {str(layer).lstrip("0") or "0": each for layer, each in given.items()}
    own = [overrides.get(str(layer), {}) for layer in range(len(kinds))]
    others = sorted({key for each in own for key in each} - {"head_dim", "num_key_value_heads"})
    if others:
        raise UnsupportedModelError(f"{', '.join(others)} in per_layer_config is not supported")
    return [
        (
            integer(each, "num_key_value_heads", shared.num_kv_heads),
            integer(each, "head_dim", shared.head_dim),
        )
        for each in own
    ]


def _head_dim(shapes: Sequence[LayerShape], kinds: Sequence[str], kind: str) -> int:
    """Return the head size of layers of one kind, which share a rotary embedding."""
    sizes = {shape.head_dim for shape, each in zip(shapes, kinds, strict=True) if each == kind}
    if len(sizes) > 1:
        raise UnsupportedModelError(f"layers of {kind} have heads of different sizes: {sorted(sizes)}")
    return sizes.pop()


def _layer_inputs(config: Config, vocab_size: int) -> LayerInputs | None:
    width = count(config, "hidden_size_per_layer_input", 0)
    if not width:
        return None
    num_rows = integer(config, "vocab_size_per_layer_input")
    token_id = count(config, "pad_token_id", 0)
    if num_rows < vocab_size or token_id >= num_rows:
        raise ConfigurationError(f"vocab_size_per_layer_input {num_rows} is below that of token ids")
    return LayerInputs(width, num_rows, token_id)


def _experts(config: Config) -> Experts:
    names = {"num_local_experts": "num_experts", "num_experts_per_tok": "top_k_experts"}
    sizes = {ours: integer(config, theirs) for ours, theirs in names.items()}
    experts = mixtral.experts({**config, **sizes}, "moe_intermediate_size")
    return replace(experts, has_router_norm=True, has_expert_scales=True, beside_dense=True)
