"""Qwen 1.5 and 2 MoE: Qwen 2 with experts and a gated shared expert in all layers or in some."""

from dataclasses import replace

from tgis.shard.checkpoint.weights import Source, stack
from tgis.shard.models.config_reader import Config, integer
from tgis.shard.models.families import llama, qwen3_moe
from tgis.shard.models.parts.sliding_window import layer_windows
from tgis.shard.models.spec import DecoderSpec

MODEL_TYPES: tuple[str, ...] = ("qwen2_moe",)

# Values that a configuration may leave out.
DEFAULTS = {
    "num_key_value_heads": 16,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
}


def spec(config: Config) -> DecoderSpec:
    config = {**DEFAULTS, **config}
    shared = llama.spec({**config, "attention_bias": False})
    experts = qwen3_moe.experts(config, shared.num_layers)
    return replace(
        shared,
        windows=_windows(config, shared.num_layers),
        qkv_bias=bool(config.get("qkv_bias", True)),
        experts=replace(
            experts,
            shared_size=integer(config, "shared_expert_intermediate_size", 5632),
            has_shared_gate=True,
        ),
    )


def sources(spec: DecoderSpec) -> dict[str, Source]:
    return {**llama.sources(spec), **expert_sources()}


def expert_sources() -> dict[str, Source]:
    """Return the sources of a router, its experts and the shared expert."""
    mlp = "model.layers.{i}.mlp."
    shared = mlp + "shared_expert."
    return {
        **qwen3_moe.expert_sources(mlp),
        "blocks.{i}.mlp.shared.up": stack(shared + "gate_proj", shared + "up_proj"),
        "blocks.{i}.mlp.shared.down": shared + "down_proj",
        "blocks.{i}.mlp.shared_gate": mlp + "shared_expert_gate",
    }


def _windows(config: Config, num_layers: int) -> tuple[int | None, ...]:
    """Return the layers' windows: every other one of the first layers has one. `sliding_window` has no effect
    without `use_sliding_window`."""
    if not config.get("use_sliding_window"):
        return layer_windows({**config, "sliding_window": None}, [False] * num_layers)
    end = 0 if config.get("max_window_layers") == 0 else integer(config, "max_window_layers", 28)
    is_local = [layer % 2 == 0 and layer < end for layer in range(num_layers)]
    return layer_windows({"sliding_window": 4096, **config}, is_local)
