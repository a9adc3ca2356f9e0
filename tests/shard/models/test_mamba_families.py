"""Configurations of families with Mamba layers: forms that checkpoints have, and refusals."""

from typing import Any

import pytest
import torch

from tests.support.shard.family_cases.hybrids import CASES
from tests.support.shard.stepping import ALONE
from tgis.shard.memory.kv_cache import bytes_per_block
from tgis.shard.models.interface import UnsupportedModelError
from tgis.shard.models.registry import check_sharding, make_spec


def read(case: str) -> dict[str, Any]:
    return CASES[case]().to_dict()


def test_a_pattern_means_the_same_as_a_list() -> None:
    """The published checkpoints have a pattern, and transformers 5 writes a list."""
    listed = read("nemotron_h_experts")
    older = {key: value for key, value in listed.items() if key not in ("layers_block_type", "layer_types")}
    assert make_spec({**older, "hybrid_override_pattern": "EM-*"}) == make_spec(listed)
    assert make_spec({**older, "layers_block_type": ["moe", "mamba", "mlp", "attention"]}) == make_spec(
        listed
    )


def test_a_model_without_attention_has_blocks_without_bytes() -> None:
    spec = make_spec(read("mamba2"))
    assert spec.num_cache_layers == 0
    assert bytes_per_block(spec, ALONE, 16, torch.bfloat16) == 0
    check_sharding(spec, 2)
    with pytest.raises(
        UnsupportedModelError, match="8 Mamba heads in 2 groups cannot be split over 16 shards"
    ):
        check_sharding(spec, 16)


def test_the_width_of_mamba_beside_attention() -> None:
    config = read("falcon_h1")
    without = {key: value for key, value in config.items() if key not in ("mamba_d_ssm", "mamba_d_head")}
    for changed, width in ((config, 48), ({**without, "mamba_d_ssm": None}, 64), (without, 1024)):
        spec = make_spec({**changed})
        assert spec.mamba is not None  # type: ignore[union-attr]
        assert spec.mamba.width == width  # type: ignore[union-attr]


REFUSED = [
    ("nemotron_h", "layers_block_type", ["mlp", "mlp2"], r"layers_block_type \['mlp', 'mlp2'\]"),
    ("nemotron_h", "sliding_window", 8, "sliding_window of the configuration is not supported"),
    ("nemotron_h", "attention_bias", True, "attention_bias True"),
    ("nemotron_h", "mamba_hidden_act", "gelu", "mamba_hidden_act 'gelu'"),
    ("nemotron_h", "n_groups", 3, "8 Mamba heads in 3 groups do not divide 64 channels"),
    ("nemotron_h_experts", "n_group", 3, "tokens cannot use 3 of 8 experts from 1 of 3 groups"),
    ("falcon_h1", "hidden_act", "gelu", "hidden_act 'gelu'"),
    (
        "falcon_h1",
        "mlp_multipliers",
        [1.0],
        r"mlp_multipliers \[1.0\] of the configuration is not a list of 2",
    ),
    (
        "falcon_h1",
        "ssm_multipliers",
        [1, 1, 0, 1, 1],
        "ssm_multipliers 0 of the configuration is not a positive",
    ),
    ("mamba2", "head_dim", 16, "8 Mamba heads of 16 are not 64 channels"),
    ("mamba2", "hidden_act", "relu", "hidden_act 'relu'"),
]


@pytest.mark.parametrize(("case", "key", "value", "text"), REFUSED)
def test_refuses_what_it_cannot_compute(case: str, key: str, value: object, text: str) -> None:
    config = read(case)
    make_spec(config)
    with pytest.raises(UnsupportedModelError, match=text):
        make_spec({**config, key: value})
