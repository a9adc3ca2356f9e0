"""DeepSeek V2: latent attention, YaRN, experts chosen from groups, shared experts, and dense layers first."""

from dataclasses import replace
from math import log

from tgis.shard.checkpoint.weights import Source, part_of_head, rotated_first, stack
from tgis.shard.models.config_reader import (
    Config,
    count,
    integer,
    optional_number,
    read_mscale,
    refuse_others,
)
from tgis.shard.models.families import glm4_moe, llama
from tgis.shard.models.interface import UnsupportedModelError
from tgis.shard.models.spec import DecoderSpec, Experts, Latent

MODEL_TYPES: tuple[str, ...] = ("deepseek_v2",)

# Values that a configuration may leave out.
DEFAULTS = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "moe_intermediate_size": 1407,
    "first_k_dense_replace": 0,
    "topk_method": "greedy",
}


def spec(config: Config) -> DecoderSpec:
    config = {**DEFAULTS, **config}
    refuse_others(config, topk_method=("greedy", "group_limited_greedy"), mlp_bias=False)
    refuse_others(config, scoring_func="softmax", norm_topk_prob=False, moe_layer_freq=1)
    shared = latent_spec({**config, "rope_interleave": True})
    return replace(shared, experts=_experts(config, shared.num_layers))


def sources(spec: DecoderSpec) -> dict[str, Source]:
    """Return the sources of latent attention and of experts as all families with latents store them."""
    latent = spec.latent
    assert latent is not None, "these families have latents"
    attention = "model.layers.{i}.self_attn."
    order = latent.rope_dim, latent.has_adjacent_pairs
    name = "q_proj" if latent.query_rank is None else "q_b_proj"
    queries = rotated_first(attention + name, latent.query_dim, *order)
    pages = rotated_first(attention + "kv_a_proj_with_mqa", latent.page_dim, *order)
    kv = attention + "kv_b_proj"
    has_rank = latent.query_rank is not None
    return {
        **llama.sources(spec),
        **glm4_moe.expert_sources("model.layers.{i}.mlp."),
        "blocks.{i}.attention.latents": stack(attention + "q_a_proj" if has_rank else queries, pages),
        "blocks.{i}.attention.q_norm": attention + "q_a_layernorm",
        "blocks.{i}.attention.q": queries,
        "blocks.{i}.attention.latent_norm": attention + "kv_a_layernorm",
        "blocks.{i}.attention.heads.{e}.keys": part_of_head(kv, spec.num_heads, slice(0, latent.plain_dim)),
        "blocks.{i}.attention.heads.{e}.values": part_of_head(
            kv, spec.num_heads, slice(latent.plain_dim, None)
        ),
    }


def latent_spec(config: Config) -> DecoderSpec:
    """Return a specification with latent attention and without experts. Raises UnsupportedModelError."""
    latent = _latent(config)
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(given, dict):
        raise UnsupportedModelError(f"rope parameters {given!r} are not supported")
    # All channels that are apart from the others are rotated, whatever share of a head they are.
    given = {key: value for key, value in given.items() if key != "partial_rotary_factor"}
    sizes = {"head_dim": latent.rope_dim, "num_key_value_heads": 1, "partial_rotary_factor": None}
    shared = llama.spec({**config, **sizes, "rope_scaling": None, "rope_parameters": given})
    if shared.qkv_bias and latent.query_rank is None:
        raise UnsupportedModelError("attention_bias without q_lora_rank is not supported")
    return replace(
        shared,
        head_dim=latent.page_dim,
        latent=latent,
        attention_scale=latent.query_dim**-0.5 * _yarn_scale(given),
    )


def _latent(config: Config) -> Latent:
    rank = None if config.get("q_lora_rank") is None else integer(config, "q_lora_rank")
    return Latent(
        rank=integer(config, "kv_lora_rank"),
        rope_dim=integer(config, "qk_rope_head_dim"),
        plain_dim=integer(config, "qk_nope_head_dim"),
        value_dim=integer(config, "v_head_dim"),
        query_rank=rank,
        has_adjacent_pairs=bool(config.get("rope_interleave", True)),
    )


def _yarn_scale(rope: Config) -> float:
    """Return the factor of attention scores by which YaRN counters longer sequences."""
    mscale = read_mscale(rope, "mscale_all_dim")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    factor = optional_number(rope, "factor") or 1.0
    if kind == "default" or mscale is None or factor <= 1:
        return 1.0
    return (0.1 * mscale * log(factor) + 1) ** 2


def _experts(config: Config, num_layers: int) -> Experts:
    has_groups = config["topk_method"] == "group_limited_greedy"
    groups = {} if has_groups else {"n_group": 1, "topk_group": 1}
    chosen = glm4_moe.experts({**config, **groups}, num_layers)
    first = frozenset(range(min(num_layers, count(config, "first_k_dense_replace", 0))))
    return replace(
        chosen,
        normalised=False,
        dense_layers=first,
        probabilities="softmax",
        has_choice_bias=False,
        num_ranking=1,
    )
