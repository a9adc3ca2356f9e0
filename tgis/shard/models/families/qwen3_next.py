"""Qwen 3 Next: Qwen 3 MoE with gated DeltaNet instead of attention in most layers, a gate of the attention's
output, a partial rotary embedding and a gated shared expert."""

from dataclasses import replace

from tgis.shard.checkpoint.weights import Source, by_group, stack
from tgis.shard.models.config_reader import Config, integer, refuse_others
from tgis.shard.models.families import llama, qwen2_moe, qwen3_moe
from tgis.shard.models.interface import UnsupportedModelError
from tgis.shard.models.spec import DecoderSpec, DeltaNetSpec

MODEL_TYPES: tuple[str, ...] = ("qwen3_next",)

# Values that a configuration may leave out.
DEFAULTS = {
    "num_key_value_heads": 2,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
}
RECURRENT, ATTENTION = "linear_attention", "full_attention"


def spec(config: Config) -> DecoderSpec:
    config = {**DEFAULTS, **config}
    return add_experts(config, dense_spec(config))


def sources(spec: DecoderSpec) -> dict[str, Source]:
    shared = {**attention_sources(spec), **qwen2_moe.expert_sources()}
    delta = spec.delta_net
    mixer = "model.layers.{i}.linear_attn."
    if delta is None:
        return shared
    # The rows of a key head and of the value heads that share it are adjacent.
    num_sharing = delta.num_heads // delta.num_key_heads
    width = num_sharing * delta.head_dim
    heights = [delta.key_dim, delta.key_dim, width, width]  # queries, keys, values, gate
    return {
        **shared,
        "blocks.{i}.delta_net.in": by_group(
            mixer + "in_proj_qkvz", delta.num_key_heads, heights, [3, 0, 1, 2]
        ),
        "blocks.{i}.delta_net.gates": by_group(
            mixer + "in_proj_ba", delta.num_key_heads, [num_sharing, num_sharing], [0, 1]
        ),
    }


def dense_spec(config: Config) -> DecoderSpec:
    """Return the specification without experts. Raises UnsupportedModelError."""
    refuse_others(config, attn_output_gate=True)
    plain = llama.spec(config)
    delta = _delta_net(config, _list_recurrent(config, plain.num_layers))
    return replace(plain, norm="rms_plus_one", qk_norm="head", has_output_gate=True, delta_net=delta)


def add_experts(config: Config, dense: DecoderSpec) -> DecoderSpec:
    """Return the specification with experts, one of which all tokens use. Raises UnsupportedModelError."""
    experts = qwen3_moe.experts(config, dense.num_layers)
    shared_size = integer(config, "shared_expert_intermediate_size", 512)
    return replace(dense, experts=replace(experts, shared_size=shared_size, has_shared_gate=True))


def attention_sources(spec: DecoderSpec) -> dict[str, Source]:
    """Return the sources of all but the first matrices of gated DeltaNet and the experts."""
    attention, mixer = "model.layers.{i}.self_attn.", "model.layers.{i}.linear_attn"
    # The rows of a head's gate follow those of its queries.
    queries = by_group(attention + "q_proj", spec.num_heads, [spec.head_dim, spec.head_dim], [1, 0])
    return {
        **llama.sources(spec),
        "blocks.{i}.attention.qkv": stack(queries, attention + "k_proj", attention + "v_proj"),
        "blocks.{i}.attention.q_norm": attention + "q_norm",
        "blocks.{i}.attention.k_norm": attention + "k_norm",
        "blocks.{i}.delta_net": mixer,
        "blocks.{i}.delta_net.conv": mixer + ".conv1d",
        "blocks.{i}.delta_net.norm": mixer + ".norm",
        "blocks.{i}.delta_net.out": mixer + ".out_proj",
    }


def _list_recurrent(config: Config, num_layers: int) -> frozenset[int]:
    interval = integer(config, "full_attention_interval", 4)
    types = config.get("layer_types") or [
        ATTENTION if (i + 1) % interval == 0 else RECURRENT for i in range(num_layers)
    ]
    is_list = isinstance(types, list | tuple) and len(types) == num_layers
    if not is_list or any(each not in (RECURRENT, ATTENTION) for each in types):
        raise UnsupportedModelError(f"layer_types {types!r} of the configuration are not supported")
    return frozenset(i for i, each in enumerate(types) if each == RECURRENT)


def _delta_net(config: Config, layers: frozenset[int]) -> DeltaNetSpec | None:
    """Return the recurrent layers, or None if there are none. Raises UnsupportedModelError."""
    if not layers:
        return None
    if len(layers) == integer(config, "num_hidden_layers"):
        raise UnsupportedModelError(
            "a model of only linear attention, without full attention, is not supported"
        )
    refuse_others(config, hidden_act="silu")
    num_heads = integer(config, "linear_num_value_heads", 32)
    num_key_heads = integer(config, "linear_num_key_heads", 16)
    if num_heads % num_key_heads:
        raise UnsupportedModelError(
            f"{num_heads} value heads cannot share {num_key_heads} key heads of linear attention"
        )
    return DeltaNetSpec(
        layers=layers,
        num_heads=num_heads,
        head_dim=integer(config, "linear_value_head_dim", 128),
        num_key_heads=num_key_heads,
        key_dim=integer(config, "linear_key_head_dim", 128),
        kernel_size=integer(config, "linear_conv_kernel_dim", 4),
    )
