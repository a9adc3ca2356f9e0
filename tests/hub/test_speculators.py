"""Speculators are recognized by config.json, and models with similar names are not."""

from pathlib import Path
from typing import Any

import pytest

from tgis.hub.model_files import ModelNotFoundError
from tgis.hub.speculators import find_eagle, find_speculator


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "eagle3"),
        ({"architectures": ["Eagle3LlamaForCausalLM"]}, "eagle3"),
        ({"architectures": ["Eagle3Speculator"]}, "eagle3"),
        ({"architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3"}, "eagle3"),
        ({"architectures": ["LlamaForCausalLMEagle"]}, "eagle"),
        ({"architectures": ["EAGLEModel"], "model_type": "eagle"}, "eagle"),
        ({"architectures": None, "speculators_model_type": "eagle"}, "eagle"),
        ({"architectures": ["Eagle2ForConditionalGeneration"], "model_type": "eagle_2_5_vl"}, None),
        ({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, None),
        ({"architectures": "LlamaForCausalLMEagle3"}, None),
        ({}, None),
    ],
)
def test_heads_are_named_by_architecture_or_type(config: dict[str, Any], kind: str | None) -> None:
    assert find_eagle(config) == kind


def test_the_models_own_head_needs_no_files(tmp_path: Path) -> None:
    assert str(find_speculator("mtp", tmp_path)) == "mtp"


def test_a_directory_without_a_configuration_is_no_speculator(tmp_path: Path) -> None:
    directory = tmp_path / "heads"
    directory.mkdir()
    with pytest.raises(ModelNotFoundError) as error:
        find_speculator(str(directory), tmp_path)
    assert str(error.value) == f"speculator: {directory} has no config.json"
    (directory / "config.json").write_text("{}")
    assert find_speculator(str(directory), tmp_path) == directory
