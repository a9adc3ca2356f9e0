"""GLM 4.5: Llama with a rotary embedding of half of the channels, experts chosen by biased probabilities, a
shared expert, and dense layers first."""

from dataclasses import replace

from tgis.shard.checkpoint.weights import Source, stack
from tgis.shard.models.config_reader import Config, count, integer, number
from tgis.shard.models.families import llama, qwen3, qwen3_moe
from tgis.shard.models.interface import UnsupportedModelError
from tgis.shard.models.spec import DecoderSpec, Experts

MODEL_TYPES: tuple[str, ...] = ("glm4_moe",)

# Values that a configuration may leave out.
DEFAULTS = {
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "partial_rotary_factor": 0.5,
    "n_routed_experts": 128,
    "moe_intermediate_size": 1408,
}


def spec(config: Config) -> DecoderSpec:
    config = {**DEFAULTS, **config}
    shared = llama.spec(config)
    return replace(
        shared,
        out_bias=False,
        qk_norm="head" if config.get("use_qk_norm") else "none",
        experts=experts(config, shared.num_layers),
    )


def sources(spec: DecoderSpec) -> dict[str, Source]:
    return {**qwen3.sources(spec), **expert_sources("model.layers.{i}.mlp.")}


def experts(config: Config, num_layers: int) -> Experts:
    """Return the experts, as in DeepSeek V3. Raises UnsupportedModelError."""
    size = integer(config, "moe_intermediate_size")
    chosen = Experts(
        integer(config, "n_routed_experts"),
        integer(config, "num_experts_per_tok", 8),
        size,
        normalised=bool(config.get("norm_topk_prob", True)),
        dense_layers=frozenset(range(min(num_layers, count(config, "first_k_dense_replace", 1)))),
        shared_size=size * count(config, "n_shared_experts", 1),
        probabilities="sigmoid",
        has_choice_bias=True,
        num_groups=integer(config, "n_group", 1),
        num_active_groups=integer(config, "topk_group", 1),
        weight_scale=number(config, "routed_scaling_factor", 1.0),
    )
    _check_groups(chosen)
    return chosen


def expert_sources(mlp: str) -> dict[str, Source]:
    """Return the sources of layers with experts. `mlp` begins the names of their modules."""
    shared = mlp + "shared_experts."
    return {
        **qwen3_moe.expert_sources(mlp),
        "blocks.{i}.mlp.choice": mlp + "gate.e_score_correction_bias",
        "blocks.{i}.mlp.shared.up": stack(shared + "gate_proj", shared + "up_proj"),
        "blocks.{i}.mlp.shared.down": shared + "down_proj",
    }


def _check_groups(experts: Experts) -> None:
    groups, active = experts.num_groups, experts.num_active_groups
    size, rest = divmod(experts.num_experts, groups)
    is_possible = groups == 1 or (not rest and size > 1 and active <= groups)
    num_candidates = size * active if groups > 1 else experts.num_experts
    if not is_possible or experts.num_active > num_candidates:
        text = f"tokens cannot use {experts.num_active} of {experts.num_experts} experts"
        raise UnsupportedModelError(f"{text} from {active} of {groups} groups")
