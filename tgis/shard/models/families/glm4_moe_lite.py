"""GLM 4.7 Flash: DeepSeek V3 with its own list of dense layers."""

from dataclasses import replace

from tgis.shard.models.config_reader import Config
from tgis.shard.models.families import deepseek_v2, glm4_moe
from tgis.shard.models.interface import UnsupportedModelError
from tgis.shard.models.spec import DecoderSpec

MODEL_TYPES: tuple[str, ...] = ("glm4_moe_lite",)
sources = deepseek_v2.sources

# Values that a configuration may leave out.
DEFAULTS = {
    "q_lora_rank": 768,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "rms_norm_eps": 1e-5,
    "n_routed_experts": 64,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1536,
    "routed_scaling_factor": 1.8,
}


def spec(config: Config) -> DecoderSpec:
    config = {**DEFAULTS, **config}
    shared = deepseek_v2.latent_spec(config)
    experts = glm4_moe.experts(config, shared.num_layers)
    return replace(shared, experts=replace(experts, dense_layers=_dense_layers(config, shared.num_layers)))


def _dense_layers(config: Config, num_layers: int) -> frozenset[int]:
    kinds = config.get("mlp_layer_types") or ["dense"] + ["sparse"] * (num_layers - 1)
    known = isinstance(kinds, list) and all(kind in ("dense", "sparse") for kind in kinds)
    if not known or len(kinds) < num_layers:
        raise UnsupportedModelError(f"mlp_layer_types {kinds!r} is not a list of {num_layers} known kinds")
    return frozenset(layer for layer in range(num_layers) if kinds[layer] == "dense")
