"""Granite 4: Granite 3 with Mamba 2 instead of attention in most layers, and a shared MLP. Some models have
experts in addition, or attention in all layers or none."""

import math
from dataclasses import replace

from tgis.shard.checkpoint.weights import Source
from tgis.shard.models.config_reader import (
    MAX_FLOAT,
    Config,
    integer,
    is_number,
    refuse_others,
    refuse_partial_rope,
)
from tgis.shard.models.families import granite, granitemoe, mixtral
from tgis.shard.models.interface import UnsupportedModelError
from tgis.shard.models.spec import DecoderSpec, MambaSpec

MODEL_TYPES: tuple[str, ...] = ("granitemoehybrid",)

INFINITY = {"__float__": "Infinity"}  # as transformers 5 writes it
MAMBA, ATTENTION = ("mamba", "linear_attention"), ("attention", "full_attention")


def spec(config: Config) -> DecoderSpec:
    refuse_partial_rope(config)
    refuse_others(config, position_embedding_type=("rope", "nope"))
    num_experts = config.get("num_local_experts", 8)
    # Without experts, there is only the shared MLP.
    shared = integer(config, "shared_intermediate_size", 1024)
    plain = granite.spec(config if num_experts else {**config, "intermediate_size": shared})
    has_rope = config.get("position_embedding_type") == "rope"
    experts = replace(mixtral.experts(config), shared_size=shared) if num_experts else None
    return replace(plain, experts=experts, rope=plain.rope if has_rope else None, mamba=_mamba(config, plain))


def sources(spec: DecoderSpec) -> dict[str, Source]:
    shared = "model.layers.{i}.shared_mlp."
    path = "blocks.{i}.mlp.shared" if spec.experts else "blocks.{i}.mlp"
    return {
        **granitemoe.sources(spec),
        f"{path}.up": shared + "input_linear",
        f"{path}.down": shared + "output_linear",
        **mamba_sources("model.layers.{i}.mamba"),
    }


def mamba_sources(mixer: str) -> dict[str, Source]:
    """Return the sources of Mamba layers. `mixer` is the name of the module that has all their tensors."""
    return {
        "blocks.{i}.mamba": mixer,
        "blocks.{i}.mamba.in": mixer + ".in_proj",
        "blocks.{i}.mamba.conv": mixer + ".conv1d",
        "blocks.{i}.mamba.norm": mixer + ".norm",
        "blocks.{i}.mamba.out": mixer + ".out_proj",
    }


def _mamba(config: Config, plain: DecoderSpec) -> MambaSpec | None:
    """Return the recurrent layers, or None if there are none. Raises UnsupportedModelError."""
    layers = _list_mamba_layers(config, plain.num_layers)
    if not layers:
        return None
    refuse_others(config, hidden_act="silu")
    return read_mamba(config, layers, integer(config, "mamba_expand", 2) * plain.hidden_size)


def read_mamba(config: Config, layers: frozenset[int], width: int) -> MambaSpec:
    """Return recurrent layers of a width, as this family's configuration names them. Raises
    UnsupportedModelError."""
    num_heads, num_groups = integer(config, "mamba_n_heads", 128), integer(config, "mamba_n_groups", 1)
    if width % num_heads or num_heads % num_groups:
        raise UnsupportedModelError(
            f"{num_heads} Mamba heads in {num_groups} groups do not divide {width} channels"
        )
    refuse_others(config, mamba_d_head=("auto", width // num_heads))
    shortest, longest = _read_limits(config)
    has_bias = bool(config.get("mamba_proj_bias"))
    return MambaSpec(
        layers=layers,
        num_heads=num_heads,
        head_dim=width // num_heads,
        num_groups=num_groups,
        state_size=integer(config, "mamba_d_state", 256),
        kernel_size=integer(config, "mamba_d_conv", 4),
        proj_bias=has_bias,
        out_bias=has_bias,
        conv_bias=config.get("mamba_conv_bias") is not False,
        min_step=shortest,
        max_step=longest,
    )


def _list_mamba_layers(config: Config, num_layers: int) -> frozenset[int]:
    types = config.get("layer_types") or config.get("layers_block_type") or ["mamba"] * num_layers
    is_list = isinstance(types, list | tuple) and len(types) == num_layers
    if not is_list or any(each not in MAMBA + ATTENTION for each in types):
        raise UnsupportedModelError(f"layer_types {types!r} of the configuration are not supported")
    return frozenset(i for i, each in enumerate(types) if each in MAMBA)


def _read_limits(config: Config) -> tuple[float, float]:
    limits = config.get("time_step_limit")
    if limits is None:
        return 0.0, math.inf
    is_pair = isinstance(limits, list | tuple) and len(limits) == 2
    pair = [math.inf if each == INFINITY else each for each in limits] if is_pair else []
    if not is_pair or not all(map(is_number, pair)) or not _are_limits(*pair):
        raise UnsupportedModelError(f"time_step_limit {limits!r} of the configuration is not supported")
    return float(pair[0]), float(pair[1])


def _are_limits(shortest: float, longest: float) -> bool:
    return (
        0 <= shortest <= longest and shortest <= MAX_FLOAT and (longest <= MAX_FLOAT or longest == math.inf)
    )
