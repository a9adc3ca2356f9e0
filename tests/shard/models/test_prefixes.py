"""Names of a language model's tensors: alone, and in the old and the new form of multimodal checkpoints."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.shard.checkpoints import write_model
from tests.support.shard.family_cases.all import CASES
from tests.support.shard.stepping import compute_prompt, load
from tgis.shard.models.registry import FAMILIES

IDS = list(range(3, 30))
NAMES: dict[str, Callable[[str], str]] = {
    "alone": lambda name: name,
    "old": lambda name: f"language_model.{name}",
    "new": lambda name: name.replace("model.", "model.language_model.", 1),
}
# One case of each type whose tensors may be those of a multimodal checkpoint.
ONE_OF_EACH = {
    make().model_type: make
    for make in CASES.values()
    if getattr(FAMILIES[make().model_type], "PREFIX", "") == "language_model."
}
OTHER_PARTS = ("vision", "visual", "multi_modal")
QUICK = ("ministral3", "mistral4", "gemma3")


@pytest.mark.parametrize(
    "model_type",
    [pytest.param(each, marks=[] if each in QUICK else [pytest.mark.slow], id=each) for each in ONE_OF_EACH],
)
def test_all_forms_of_names_are_read(model_type: str, tmp_path: Path) -> None:
    write_model(tmp_path, ONE_OF_EACH[model_type]())
    expected = compute_prompt(load(tmp_path), IDS)
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    text = {name: tensor for name, tensor in stored.items() if not any(part in name for part in OTHER_PARTS)}
    for rename in NAMES.values():
        save_file({rename(shorten(name)): tensor for name, tensor in text.items()}, file, {"format": "pt"})
        assert torch.equal(compute_prompt(load(tmp_path), IDS), expected)


def shorten(name: str) -> str:
    """Return a tensor's name in a checkpoint of the language model alone."""
    name = name.replace("model.language_model.", "model.", 1)
    return name.removeprefix("language_model.")


def test_types_of_text_parts_have_prefixes() -> None:
    assert ONE_OF_EACH.keys() >= {*QUICK}
    assert {"ministral3", "mistral4", "gemma4_text", "llama4_text", "qwen3_5_text"} <= ONE_OF_EACH.keys()
