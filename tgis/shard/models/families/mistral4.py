"""Mistral 4: DeepSeek V3 with experts chosen by softmax and queries whose scale grows with the position."""

from collections.abc import Mapping
from dataclasses import replace

from tgis.shard.checkpoint.weights import Source, expert, first_of
from tgis.shard.models.config_reader import Config
from tgis.shard.models.families import deepseek_v2, glm4_moe, ministral3
from tgis.shard.models.spec import DecoderSpec

MODEL_TYPES: tuple[str, ...] = ("mistral4",)
PREFIX = "language_model."

# Values that a configuration may leave out.
DEFAULTS = {
    "q_lora_rank": 1024,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 128,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 0,
}
ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def spec(config: Config) -> DecoderSpec:
    config = {**DEFAULTS, **config}
    given = config.get("rope_parameters") or config.get("rope_scaling") or ROPE
    shared = deepseek_v2.latent_spec({**config, "rope_parameters": given})
    experts = glm4_moe.experts(config, shared.num_layers)
    return replace(
        shared,
        experts=replace(experts, probabilities="softmax", has_choice_bias=False),
        query_scaling=ministral3.query_scaling(given if isinstance(given, Mapping) else {}),
    )


def sources(spec: DecoderSpec) -> dict[str, Source]:
    """Return the sources. Experts are stored in one tensor, or as modules if they are quantized."""
    shared = deepseek_v2.sources(spec)
    layers = {"up": "gate_up_proj", "down": "down_proj"}
    paths = {f"blocks.{{i}}.mlp.experts.{{e}}.{path}": name for path, name in layers.items()}
    experts = "model.layers.{i}.mlp.experts."
    fused = {path: first_of(expert(experts + name), shared[path]) for path, name in paths.items()}
    return {**shared, **fused}
