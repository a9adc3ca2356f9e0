"""Configurations in the form in which models are published: all keys, also those of older releases of
transformers, and values that are left out."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from tests.support.shard.checkpoints import write_model
from tests.support.shard.family_oracle import load_model
from tests.support.shard.small_configs import NAMES, read_published, shrink
from tests.support.shard.stepping import compute_prompt, load
from tgis.shard.models.registry import check_sharding, make_spec
from tgis.shard.quant.registry import find_format

IDS = torch.randint(3, 99, (30,), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.mark.parametrize("name", NAMES)
def test_is_accepted(name: str, tmp_path: Path) -> None:
    config = read_published(name)
    spec = make_spec(config)
    check_sharding(spec, 2)
    assert spec.num_layers == config.get("text_config", config)["num_hidden_layers"]
    assert (find_format(config, tmp_path) is None) == ("quantization_config" not in config)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_small_models_equal_transformers(name: str, tmp_path: Path) -> None:
    small = shrink(read_published(name))
    file = tmp_path / "config.json"
    file.write_text(json.dumps(small))
    write_model(tmp_path, AutoConfig.from_pretrained(tmp_path))
    file.write_text(json.dumps(small))
    oracle = load_model(tmp_path, AutoConfig.from_pretrained(tmp_path))
    with torch.inference_mode():
        expected = oracle(torch.tensor([IDS]), use_cache=False).logits[0].log_softmax(-1)
    actual = compute_prompt(load(tmp_path), IDS).log_softmax(-1)
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)
