"""Llama 4, also the text part of multimodal checkpoints: chunked attention, layers with full attention and no
rotary embedding, experts whose inputs are weighted, and a shared expert."""

from collections.abc import Mapping
from dataclasses import replace

from tgis.shard.checkpoint.weights import (
    Source,
    adjacent_pairs,
    expert,
    first_of,
    stack,
    transposed,
)
from tgis.shard.models.config_reader import Config, integer, number, refuse_partial_rope
from tgis.shard.models.families import llama, mixtral
from tgis.shard.models.interface import UnsupportedModelError
from tgis.shard.models.parts.nope import leave_out, read_nope_layers
from tgis.shard.models.parts.sliding_window import layer_chunks
from tgis.shard.models.spec import DecoderSpec, Experts, QueryScaling

MODEL_TYPES: tuple[str, ...] = ("llama4", "llama4_text")
PREFIX = "language_model."

# Values that a configuration may leave out.
DEFAULTS = {
    "vocab_size": 202048,
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_local_experts": 16,
    "num_experts_per_tok": 1,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
}


def spec(config: Config) -> DecoderSpec:
    text = config.get("text_config", config)
    if not isinstance(text, Mapping):
        raise UnsupportedModelError(f"text_config {text!r} of the configuration is not an object")
    config = {**DEFAULTS, **text}
    refuse_partial_rope(config)
    shared = llama.spec({**config, "intermediate_size": config["intermediate_size_mlp"], "mlp_bias": False})
    nope_layers = read_nope_layers(config, shared.num_layers)
    is_chunked = [layer not in nope_layers for layer in range(shared.num_layers)]
    if shared.rope is None or shared.rope.amplitude != 1:
        raise UnsupportedModelError("a rope with an attention factor is not supported for this model type")
    return replace(
        shared,
        layer_ropes=leave_out(shared.rope, nope_layers, shared.num_layers),
        chunks=layer_chunks({"attention_chunk_size": 8192, **config}, is_chunked),
        query_scaling=_query_scaling(config, nope_layers),
        qk_norm="bare_head" if config.get("use_qk_norm", True) else "none",
        experts=_experts(config, shared.num_layers),
    )


def sources(spec: DecoderSpec) -> dict[str, Source]:
    layer = "model.layers.{i}."
    attention, feed = layer + "self_attn.", layer + "feed_forward."
    one, shared = feed + "experts.{e}.", feed + "shared_expert."
    return {
        **llama.sources(spec),
        "blocks.{i}.attention.qkv": stack(
            adjacent_pairs(attention + "q_proj", spec.head_dim),
            adjacent_pairs(attention + "k_proj", spec.head_dim),
            attention + "v_proj",
        ),
        "blocks.{i}.mlp.up": stack(feed + "gate_proj", feed + "up_proj"),
        "blocks.{i}.mlp.down": feed + "down_proj",
        "blocks.{i}.mlp.router": feed + "router",
        # Quantized checkpoints have a module for each expert.
        "blocks.{i}.mlp.experts.{e}.up": first_of(
            transposed(expert(feed + "experts.gate_up_proj")),
            stack(one + "gate_proj", one + "up_proj"),
        ),
        "blocks.{i}.mlp.experts.{e}.down": first_of(
            transposed(expert(feed + "experts.down_proj")), one + "down_proj"
        ),
        "blocks.{i}.mlp.shared.up": stack(shared + "gate_proj", shared + "up_proj"),
        "blocks.{i}.mlp.shared.down": shared + "down_proj",
    }


def _experts(config: Config, num_layers: int) -> Experts:
    experts = mixtral.experts(config)
    return replace(
        experts,
        normalised=False,
        dense_layers=frozenset(range(num_layers)) - _sparse_layers(config, num_layers),
        shared_size=experts.intermediate_size,
        probabilities="sigmoid",
        scales_input=True,
    )


def _sparse_layers(config: Config, num_layers: int) -> frozenset[int]:
    named = config.get("moe_layers")
    if named is None:
        step = integer(config, "interleave_moe_layer_step", 1)
        return frozenset(range(step - 1, num_layers, step))
    if not isinstance(named, list):
        raise UnsupportedModelError(f"moe_layers {named!r} of the configuration is not a list")
    return frozenset(layer for layer in range(num_layers) if layer in named)


def _query_scaling(config: Config, nope_layers: frozenset[int]) -> QueryScaling | None:
    if not config.get("attn_temperature_tuning", True):
        return None
    beta = number(config, "attn_scale", 0.1)
    length = integer(config, "floor_scale", 8192)
    return QueryScaling(beta, length, shift=1, layers=nope_layers)
