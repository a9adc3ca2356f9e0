"""DeepSeek V3 and R1: DeepSeek V2 with experts chosen by biased probabilities."""

from dataclasses import replace

from tgis.shard.models.config_reader import Config, refuse_others
from tgis.shard.models.families import deepseek_v2, glm4_moe
from tgis.shard.models.spec import DecoderSpec

MODEL_TYPES: tuple[str, ...] = ("deepseek_v3",)
sources = deepseek_v2.sources

# Values that a configuration may leave out.
DEFAULTS = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
}


def spec(config: Config) -> DecoderSpec:
    config = {**DEFAULTS, **config}
    refuse_others(config, topk_method="noaux_tc", scoring_func="sigmoid", moe_layer_freq=1)
    shared = deepseek_v2.latent_spec(config)
    return replace(shared, experts=glm4_moe.experts(config, shared.num_layers))
