"""Qwen 3 MoE: Qwen 3 with experts in all layers or in some."""

from dataclasses import replace

from tgis.shard.checkpoint.weights import Source, stack
from tgis.shard.models.config_reader import Config, integer
from tgis.shard.models.families import mixtral, qwen3
from tgis.shard.models.interface import UnsupportedModelError
from tgis.shard.models.spec import DecoderSpec, Experts

MODEL_TYPES: tuple[str, ...] = ("qwen3_moe",)


def spec(config: Config) -> DecoderSpec:
    # If there is a window, all layers have it.
    config = {"num_key_value_heads": 4, "head_dim": None, **config, "max_window_layers": 0}
    shared = qwen3.spec(config)
    return replace(shared, experts=experts(config, shared.num_layers))


def sources(spec: DecoderSpec) -> dict[str, Source]:
    return {**qwen3.sources(spec), **expert_sources("model.layers.{i}.mlp.")}


def experts(config: Config, num_layers: int) -> Experts:
    """Return the experts. Raises UnsupportedModelError."""
    config = {"num_local_experts": config.get("num_experts"), **config}
    return replace(
        mixtral.experts(config, "moe_intermediate_size"),
        normalised=bool(config.get("norm_topk_prob")),
        dense_layers=_dense_layers(config, num_layers),
    )


def expert_sources(mlp: str) -> dict[str, Source]:
    """Return the sources of a router and its experts. `mlp` begins the names of their modules."""
    return {
        "blocks.{i}.mlp.router": mlp + "gate",
        "blocks.{i}.mlp.experts.{e}.up": stack(mlp + "experts.{e}.gate_proj", mlp + "experts.{e}.up_proj"),
        "blocks.{i}.mlp.experts.{e}.down": mlp + "experts.{e}.down_proj",
    }


def _dense_layers(config: Config, num_layers: int) -> frozenset[int]:
    named = config.get("mlp_only_layers") or []
    step = integer(config, "decoder_sparse_step", 1)
    if not isinstance(named, list):
        raise UnsupportedModelError(f"mlp_only_layers {named!r} of the configuration is not a list")
    return frozenset(i for i in range(num_layers) if i in named or (i + 1) % step)
