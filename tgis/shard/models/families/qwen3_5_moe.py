"""Qwen 3.5 MoE, whose text part is served: Qwen 3.5 with the experts of Qwen 3 Next. One tensor may hold all
experts of a layer."""

from tgis.shard.checkpoint.weights import Source, expert, first_of
from tgis.shard.models.config_reader import Config, refuse_others
from tgis.shard.models.families import qwen2_moe, qwen3_5, qwen3_next
from tgis.shard.models.spec import DecoderSpec

MODEL_TYPES: tuple[str, ...] = ("qwen3_5_moe", "qwen3_5_moe_text")
PREFIX = qwen3_5.PREFIX

# Values that a configuration may leave out.
DEFAULTS = {
    **qwen3_5.DEFAULTS,
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
}


def spec(config: Config) -> DecoderSpec:
    config = {**DEFAULTS, **qwen3_5.read_text_config(config)}
    refuse_others(config, norm_topk_prob=True)
    # All layers have experts, so the width of other MLPs has no effect.
    config = {**config, "norm_topk_prob": True, "intermediate_size": config["moe_intermediate_size"]}
    return qwen3_next.add_experts(config, qwen3_next.dense_spec(config))


def sources(spec: DecoderSpec) -> dict[str, Source]:
    experts, paths = "model.layers.{i}.mlp.experts.", "blocks.{i}.mlp.experts.{e}."
    single = qwen2_moe.expert_sources()
    return {
        **qwen3_5.sources(spec),
        **single,
        paths + "up": first_of(expert(experts + "gate_up_proj"), single[paths + "up"]),
        paths + "down": first_of(expert(experts + "down_proj"), single[paths + "down"]),
    }
