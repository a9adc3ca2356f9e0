"""Options of configurations that are not supported are refused, never ignored."""

import json
import math
import reprlib
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.shard.family_cases import gpts
from tests.support.shard.family_cases.all import CASES
from tgis.shard.models import registry
from tgis.shard.models.interface import UnsupportedModelError

REFUSED: list[tuple[str, str, Any]] = [
    ("gpt_neox", "hidden_act", "gelu_10"),
    ("gpt2", "scale_attn_by_inverse_layer_idx", True),
    ("gpt2", "add_cross_attention", True),
    ("gpt_bigcode_multi_head", "add_cross_attention", True),
    ("bloom", "apply_residual_connection_post_layernorm", True),
    ("falcon_rw", "apply_residual_connection_post_layernorm", True),
    ("opt", "layer_norm_elementwise_affine", False),
    ("mpt", "no_bias", False),
    ("mpt", "logit_scale", "inv_sqrt_d_model"),
    ("mpt", "norm_type", "rmsnorm"),
    ("mpt", "final_logit_softcapping", 30.0),
    ("mpt", "block_overrides", {"order": []}),
    ("mpt", "ffn_config.ffn_type", "mptglu"),
    ("mpt", "ffn_config.ffn_hidden_size", 64),
    ("mpt", "ffn_config.ffn_act_fn", {"name": "relu"}),
    ("mpt", "attn_config", "alibi"),
    ("mpt", "attn_config.alibi", False),
    ("mpt", "attn_config.rope", True),
    ("mpt", "attn_config.prefix_lm", True),
    ("mpt", "attn_config.sliding_window_size", 16),
    ("mpt", "attn_config.qk_ln", True),
    ("mpt", "attn_config.qk_gn", True),
    ("mpt", "attn_config.attn_type", "sparse"),
    ("mpt", "attn_config.attn_logit_softcapping", 50.0),
    ("mpt", "attn_config.kv_dim", 16),
]


@pytest.mark.parametrize(("case", "key", "value"), REFUSED, ids=str)
def test_refuses_in_one_line(case: str, key: str, value: object) -> None:
    config = json.loads(gpts.CASES[case]().to_json_string(use_diff=False))
    registry.make_spec(config)
    outer, _, inner = key.rpartition(".")
    (config.setdefault(outer, {}) if outer else config)[inner] = value
    with pytest.raises(UnsupportedModelError) as caught:
        registry.make_spec(config)
    assert repr(value) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_grouped_heads_must_be_counted() -> None:
    config = json.loads(gpts.CASES["mpt"]().to_json_string(use_diff=False))
    config["attn_config"]["attn_type"] = "grouped_query_attention"
    with pytest.raises(UnsupportedModelError, match="kv_n_heads is missing"):
        registry.make_spec(config)


WHOLE_ROPES = (
    "falcon_h1",
    "gemma4_text",
    "gpt_oss",
    "granite_swa",
    "granitemoe_swa",
    "granitemoehybrid_experts_rope_biases",
    "llama4_text",
    "ministral3",
    "olmo3",
    "smollm3",
)


@pytest.mark.parametrize("case", WHOLE_ROPES)
def test_a_rope_of_some_channels_is_refused_where_transformers_rotates_all(case: str) -> None:
    config = CASES[case]().to_dict()
    registry.make_spec(config)
    ropes = config.get("rope_parameters") or {}
    sections = [config, *(rope for rope in (ropes, *ropes.values()) if isinstance(rope, dict) and rope)]
    for section in sections:
        if section.get("rope_type") != "proportional":
            kept = section.get("partial_rotary_factor")
            section["partial_rotary_factor"] = 0.5
            assert refusal(config) == "partial_rotary_factor 0.5 of the configuration is not supported"
            section["partial_rotary_factor"] = kept


@pytest.mark.parametrize("case", ["llama_grouped_queries", "mistral3", "gemma4_multimodal"])
def test_models_that_read_later_tokens_are_refused(case: str) -> None:
    config = CASES[case]().to_dict()
    for section in (config, config.get("text_config", config)):
        section["is_causal"] = False
        assert refusal(config) == "is_causal False of the configuration is not supported"
        section["is_causal"] = True
        assert not refusal(config)


def test_zero_means_no_magnitude_of_yarn() -> None:
    config = CASES["deepseek_v3"]().to_dict()
    rope = config["rope_parameters"]
    for key in ("mscale", "mscale_all_dim"):
        without = {name: value for name, value in rope.items() if name != key}
        expected = registry.make_spec({**config, "rope_parameters": without})
        assert registry.make_spec({**config, "rope_parameters": {**rope, key: 0}}) == expected
        assert registry.make_spec(config) != expected


def test_a_rope_without_channels_is_refused() -> None:
    config = {**CASES["qwen3_next"]().to_dict(), "head_dim": 3}
    assert refusal(config) == "rotary embedding of 0 channels is not supported"


@pytest.mark.parametrize("case", ["deepseek_v2", "deepseek_v3", "glm4_moe_lite", "mistral4"])
def test_queries_have_a_rank_unless_it_is_null(case: str) -> None:
    make = CASES[case]
    config = make().to_dict()
    assert registry.make_spec({**config, "q_lora_rank": None}).latent.query_rank is None
    del config["q_lora_rank"]
    assert registry.make_spec(config).latent.query_rank == type(make())().q_lora_rank


@pytest.mark.parametrize("case", ["mistral3", "mistral3_ministral3_tied", "mistral3_mistral4"])
def test_mistral_3_is_tied_unless_its_configuration_denies_it(case: str) -> None:
    config = CASES[case]().to_dict()
    config["text_config"].pop("tie_word_embeddings")
    for given, expected in ((None, True), (True, True), (False, False)):
        spec = registry.make_spec({**config, "tie_word_embeddings": given})
        assert spec.tie_embeddings == expected
    del config["tie_word_embeddings"]
    assert registry.make_spec(config).tie_embeddings


ODD = (
    None,
    "",
    "x",
    ["silu"],
    {"a": 1},
    0,
    1,
    -1,
    3,
    10**4,
    10**9,
    10**400,
    0.5,
    1e300,
    math.inf,
    math.nan,
    True,
)
ONE_OF_EACH = {make().model_type: make for make in CASES.values()}
PARTS = 6


@pytest.mark.parametrize("model_type", ONE_OF_EACH)
def test_odd_values_are_refused_in_one_line_or_served(model_type: str) -> None:
    check_odd_values(model_type, PARTS)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ONE_OF_EACH)
def test_all_odd_values_are_refused_in_one_line_or_served(model_type: str) -> None:
    check_odd_values(model_type, 1)


def check_odd_values(model_type: str, num_parts: int) -> None:
    """Replace each value of the configuration, also of nested ones and of lists, by one part of the odd
    values in turn."""
    config = ONE_OF_EACH[model_type]().to_dict()
    num_refused = 0
    for turn, (section, key) in enumerate(list(list_places(config))):
        kept = section[key]
        for section[key] in ODD[turn % num_parts :: num_parts]:
            reason = refusal(config)
            assert "\n" not in reason
            num_refused += bool(reason)
        section[key] = kept
    assert num_refused > 20 // num_parts


def list_places(section: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every object of a configuration with each of its keys, and lists with their first and last
    index."""
    keys = section if isinstance(section, dict) else {0, len(section) - 1}
    for key in keys:
        yield section, key
        if isinstance(section[key], dict | list) and section[key]:
            yield from list_places(section[key])


LAYER_KEYS = {
    "bloom": "n_layer",
    "gpt_oss": "num_hidden_layers",
    "mamba2": "num_hidden_layers",
    "mpt": "n_layers",
    "qwen3_5_multimodal_tied": "num_hidden_layers",
    "t5": "num_decoder_layers",
}


@pytest.mark.parametrize("case", LAYER_KEYS)
def test_no_time_is_spent_on_impossible_numbers_of_layers(case: str) -> None:
    config, key = CASES[case]().to_dict(), LAYER_KEYS[case]
    part = config.get("text_config", config)
    part[key] = registry.MAX_LAYERS + 1
    if part.get("layer_types"):
        part["layer_types"] = None
    assert refusal(config) == f"{key} 4097 of the configuration is larger than 4096"
    part[key] -= 1
    assert not refusal(config)


@pytest.mark.parametrize("case", ["gpt_oss", "qwen3_5_multimodal_tied", "t5"])
def test_vocabularies_that_no_model_has_are_refused(case: str) -> None:
    config = CASES[case]().to_dict()
    for part in (config, config.get("text_config", {})):
        part["vocab_size"] = registry.MAX_VOCAB_SIZE + 1
    assert refusal(config) == "vocab_size 1048577 of the configuration is larger than 1048576"


FACTORS = [
    ("granite", "residual_multiplier"),
    ("falcon_h1", "key_multiplier"),
    ("gpt_oss", "rms_norm_eps"),
    ("gemma4_text", "final_logit_softcapping"),
]


@pytest.mark.parametrize(("case", "key"), FACTORS)
@pytest.mark.parametrize("value", [1e-300, 1e39, 10**400])
def test_numbers_beyond_float32_are_refused(case: str, key: str, value: float) -> None:
    shown = reprlib.repr(value)
    expected = f"{key} {shown} of the configuration is outside the range of float32"
    assert refusal(CASES[case]().to_dict() | {key: value}) == expected


@pytest.mark.parametrize("limits", [[math.inf, math.inf], [1e300, math.inf], [0.2, 0.1], [0, 10**400]])
def test_steps_of_mamba_have_finite_limits_in_order(limits: list[float]) -> None:
    config = CASES["mamba2"]().to_dict()
    assert refusal(config | {"time_step_limit": limits}).startswith(f"time_step_limit {limits!r} of the conf")
    assert not refusal(config | {"time_step_limit": [0.1, math.inf]})


def refusal(config: dict[str, Any]) -> str:
    """Return why the model cannot be served on two ranks; empty if it can."""
    try:
        spec = registry.make_spec(config)
        registry.check_sharding(spec, 2)
        registry.FAMILIES[config["model_type"]].sources(spec)
    except UnsupportedModelError as error:
        return str(error)
    return ""
