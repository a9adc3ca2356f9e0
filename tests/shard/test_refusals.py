"""What a configuration asks for and we do not compute is refused, never ignored."""

import json
from typing import Any

import pytest

from tests.shard.family_cases import gpts
from tgis.shard.models import catalogue
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
    catalogue.describe(config)
    outer, _, inner = key.rpartition(".")
    (config.setdefault(outer, {}) if outer else config)[inner] = value
    with pytest.raises(UnsupportedModelError) as caught:
        catalogue.describe(config)
    assert repr(value) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_grouped_heads_must_be_counted() -> None:
    config = json.loads(gpts.CASES["mpt"]().to_json_string(use_diff=False))
    config["attn_config"]["attn_type"] = "grouped_query_attention"
    with pytest.raises(UnsupportedModelError, match="kv_n_heads is missing"):
        catalogue.describe(config)
