"""Names of a language model's tensors: alone, in the old and the new form of multimodal checkpoints, and in
checkpoints of base models, which have no head."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.shard.checkpoints import write_model
from tests.support.shard.family_cases.all import CASES
from tests.support.shard.family_oracle import load_model
from tests.support.shard.stepping import compute_prompt, load
from tgis.shard.checkpoint.tensors import WeightsError
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
HEADS = ("lm_head.weight", "embed_out.weight", "language_model.lm_head.weight")
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


DECODERS = {make().model_type: make for make in CASES.values() if not make().is_encoder_decoder}
del DECODERS["llama4"]  # it consists of two models, and has no base model
QUICK_BASES = ("llama", "gemma4", "nemotron_h", "gpt_neox")


@pytest.mark.parametrize(
    "model_type",
    [
        pytest.param(each, marks=[] if each in QUICK_BASES else [pytest.mark.slow], id=each)
        for each in DECODERS
    ],
)
def test_checkpoints_of_base_models_are_read(model_type: str, tmp_path: Path) -> None:
    """As transformers saves them. A head that is tied to the embeddings is found, and one that was added."""
    config = DECODERS[model_type]()
    write_model(tmp_path, config)
    expected = compute_prompt(load(tmp_path), IDS)
    file = tmp_path / "model.safetensors"
    whole = load_model(tmp_path, config)
    heads = {name: tensor for name, tensor in load_file(file).items() if name in HEADS}
    file.unlink()
    base = whole.base_model if whole.base_model is not whole else whole.model
    base.save_pretrained(tmp_path)
    bare = load_file(file)
    assert not any(name in bare for name in HEADS)
    if heads:
        with pytest.raises(WeightsError, match=r"^\S+: the checkpoint has no head that generates text"):
            load(tmp_path)
        save_file(bare | heads, file, {"format": "pt"})
    assert torch.equal(compute_prompt(load(tmp_path), IDS), expected)
