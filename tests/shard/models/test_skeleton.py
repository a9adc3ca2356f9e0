"""A model's skeleton against the loaded model: the same prompts and adapters must fit."""

import json
from pathlib import Path

import pytest
import torch

from tests.support.shard.checkpoints import edit_config, write_llama, write_model
from tests.support.shard.family_cases.all import CASES, COVERED_BY, family_of
from tgis.shard.checkpoint.tensors import WeightsError
from tgis.shard.collectives import ProcessGroup
from tgis.shard.models import registry, skeleton
from tgis.shard.models.interface import AdaptableModel

# The last case of each family.
OF_FAMILY = {family_of(name): name for name in CASES}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[pytest.mark.slow] if family in COVERED_BY else [])
        for family, case in OF_FAMILY.items()
    ],
)
def test_it_equals_the_model(case: str, tmp_path: Path) -> None:
    write_model(tmp_path, CASES[case]())
    config = json.loads((tmp_path / "config.json").read_text())
    made = skeleton.build_skeleton(tmp_path, config, torch.float32)
    loaded = registry.load(tmp_path, config, ProcessGroup(0, 1), torch.float32)
    assert made.parts.cuts
    assert isinstance(loaded, AdaptableModel)
    assert made.parts.cuts == loaded.parts.cuts
    assert made.prompt_width == loaded.prompt_width
    assert made.spec.is_encoder_decoder == loaded.spec.is_encoder_decoder
    for path, cut in made.parts.cuts.items():
        assert made.parts.weights.trace(path, cut.shape) == loaded.parts.weights.trace(path, cut.shape)


def test_a_checkpoint_of_other_shapes_is_refused(tmp_path: Path) -> None:
    write_llama(tmp_path)
    config = {**json.loads((tmp_path / "config.json").read_text()), "intermediate_size": 64}
    edit_config(tmp_path, config)
    with pytest.raises(WeightsError, match=r"has shape \[96, 32\], expected \[128, 32\]"):
        skeleton.build_skeleton(tmp_path, config, torch.float32)
