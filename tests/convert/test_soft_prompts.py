"""`convert-prompt`, with PEFT as the writer and reader of the other files."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from peft import PeftModel, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from tests.support.shard.checkpoints import write_llama, write_model
from tests.support.shard.family_cases.all import CASES
from tgis.cli import main as cli

KINDS = {"CAUSAL_LM": AutoModelForCausalLM, "SEQ_2_SEQ_LM": AutoModelForSeq2SeqLM}
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Create prompts by PEFT's type of task."""
    directories = {kind: tmp_path_factory.mktemp(kind) for kind in KINDS}
    write_llama(directories["CAUSAL_LM"])
    write_model(directories["SEQ_2_SEQ_LM"], CASES["t5"]())
    return directories


def convert(source: Path, target: Path, *flags: str) -> Result:
    arguments = ["convert-prompt", str(source), str(target), *flags]
    return CliRunner().invoke(cli.server_main, arguments)


def refusal(source: Path, target: Path, *flags: str) -> str:
    before = listing(target)
    result = convert(source, target, *flags)
    assert result.exit_code == 1, result.output
    [line] = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert listing(target) == before
    return line.removeprefix("error: ")


def listing(directory: Path) -> list[str]:
    return sorted(os.listdir(directory)) if directory.is_dir() else []


def write_parts(directory: Path, **parts: Tensor) -> Path:
    directory.mkdir(exist_ok=True)
    for name, part in parts.items():
        torch.save(part, directory / f"{name}.pt")
    return directory


def read_parts(directory: Path) -> dict[str, Tensor]:
    return {path.stem: torch.load(path, weights_only=True) for path in directory.glob("*.pt")}


def assert_same(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert set(actual) == set(expected)
    for name, tensor in expected.items():
        assert type(actual[name]) is Tensor
        assert actual[name].dtype == tensor.dtype
        assert torch.equal(actual[name], tensor)


def draw(rows: int, dtype: torch.dtype = torch.float32, width: int = 32) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(rows)).to(dtype)


@pytest.mark.parametrize(
    ("kind", "num_parts", "flags", "names"),
    [
        ("CAUSAL_LM", None, [], ["decoder"]),
        ("SEQ_2_SEQ_LM", None, [], ["encoder"]),
        ("SEQ_2_SEQ_LM", None, ["--with-decoder"], ["decoder", "encoder"]),
        ("SEQ_2_SEQ_LM", 1, [], ["encoder"]),
    ],
)
def test_prompts_written_by_peft(
    models: Mapping[str, Path],
    tmp_path: Path,
    kind: str,
    num_parts: int | None,
    flags: list[str],
    names: list[str],
) -> None:
    base = KINDS[kind].from_pretrained(models[kind])
    config = PromptTuningConfig(task_type=kind, num_virtual_tokens=6, num_transformer_submodules=num_parts)
    tuned = get_peft_model(base, config)
    embeddings = tuned.get_prompt_embedding_to_save("default")
    tuned.save_pretrained(tmp_path / "peft")
    result = convert(tmp_path / "peft", tmp_path / "torch", *flags)
    assert result.exit_code == 0, result.output
    parts = read_parts(tmp_path / "torch")
    halves = {"encoder": embeddings[:6], "decoder": embeddings[-6:]}
    assert_same(parts, {name: halves[name] for name in names})
    if not flags:
        assert_answers_as(base, tuned, kind, parts)
    if len(parts) * 6 == len(embeddings):
        assert convert(tmp_path / "torch", tmp_path / "again").exit_code == 0
        assert torch.equal(load_file(tmp_path / "again" / WEIGHTS)["prompt_embeddings"], embeddings)


@pytest.mark.parametrize(
    ("kind", "names"),
    [("CAUSAL_LM", ["decoder"]), ("SEQ_2_SEQ_LM", ["encoder"]), ("SEQ_2_SEQ_LM", ["encoder", "decoder"])],
)
def test_peft_loads_written_prompts(
    models: Mapping[str, Path], tmp_path: Path, kind: str, names: list[str]
) -> None:
    parts = {name: draw(4) + len(name) for name in names}
    result = convert(write_parts(tmp_path / "torch", **parts), tmp_path / "peft")
    assert result.exit_code == 0, result.output
    base = KINDS[kind].from_pretrained(models[kind])
    tuned = PeftModel.from_pretrained(base, tmp_path / "peft")
    whole = torch.cat([parts[name] for name in names])
    assert torch.equal(tuned.get_prompt_embedding_to_save("default"), whole)
    assert ("PEFT itself never uses the decoder's half" in result.stdout) == (len(names) == 2)
    assert_answers_as(base, tuned, kind, {names[0]: parts[names[0]]})


def assert_answers_as(base: Any, tuned: Any, kind: str, parts: Mapping[str, Tensor]) -> None:
    """PEFT puts exactly these parts before the inputs."""
    ids = {"encoder": torch.tensor([[5, 6, 7]]), "decoder": torch.tensor([[8, 9]])}
    embed = base.get_input_embeddings()
    with torch.inference_mode():
        inputs = {name: torch.cat([parts.get(name, draw(0)), embed(ids[name])[0]])[None] for name in ids}
        if kind == "CAUSAL_LM":
            actual = tuned(input_ids=ids["decoder"]).logits
            expected = base(inputs_embeds=inputs["decoder"]).logits
        else:
            actual = tuned(input_ids=ids["encoder"], decoder_input_ids=ids["decoder"]).logits
            expected = base(inputs_embeds=inputs["encoder"], decoder_inputs_embeds=inputs["decoder"]).logits
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_there_and_back_is_exact(tmp_path: Path, dtype: torch.dtype) -> None:
    parts = {"encoder": draw(4, dtype), "decoder": draw(4, dtype) * 2}
    assert convert(write_parts(tmp_path / "a", **parts), tmp_path / "b").exit_code == 0
    assert convert(tmp_path / "b", tmp_path / "c" / "d", "--with-decoder").exit_code == 0
    assert_same(read_parts(tmp_path / "c" / "d"), parts)
    assert (tmp_path / "c" / "d" / "encoder.pt").stat().st_size < 4 * 32 * dtype.itemsize + 2000


def test_a_view_and_a_parameter_are_written_as_what_they_show(tmp_path: Path) -> None:
    source = write_parts(tmp_path / "a", decoder=torch.nn.Parameter(draw(32).T[:4]))
    assert convert(source, tmp_path / "b").exit_code == 0
    assert torch.equal(load_file(tmp_path / "b" / WEIGHTS)["prompt_embeddings"], draw(32).T[:4])


def test_a_prompt_that_is_there_is_replaced_only_when_asked(tmp_path: Path) -> None:
    source = write_parts(tmp_path / "a", decoder=draw(4))
    target = write_parts(tmp_path / "b", decoder=draw(5), encoder=draw(5))
    (target / "README").write_text("kept")
    assert (
        refusal(source, target)
        == f"{target} already has encoder.pt and decoder.pt; --overwrite replaces them"
    )
    assert convert(source, target, "--overwrite").exit_code == 0
    assert listing(target) == ["README", CONFIG, WEIGHTS]
    assert convert(target, target, "--overwrite").exit_code == 0
    assert listing(target) == ["README", "decoder.pt"]
    assert_same(read_parts(target), {"decoder": draw(4)})


def test_prompts_that_cannot_be_converted_back(tmp_path: Path) -> None:
    uneven = write_parts(tmp_path / "uneven", encoder=draw(4), decoder=draw(6))
    target = tmp_path / "target"
    shapes = "[4, 32] float32 and [6, 32] float32"
    text = f"PEFT stores encoder and decoder with the same shape and type, not {shapes}"
    assert text in refusal(uneven, target)
    mixed = write_parts(tmp_path / "mixed", encoder=draw(4), decoder=draw(4, torch.float16))
    assert "not [4, 32] float32 and [4, 32] float16" in refusal(mixed, target)
    assert not target.exists()


@pytest.mark.parametrize(
    "changed",
    [
        {"num_virtual_tokens": 5},
        {"num_transformer_submodules": 3},
        {"task_type": "CAUSAL_LM"},
        {"num_virtual_tokens": 3, "num_transformer_submodules": 2},
        {"num_virtual_tokens": "four"},
        {"num_virtual_tokens": {"four": 4}},
    ],
)
def test_a_configuration_that_its_tensor_denies(tmp_path: Path, changed: dict[str, object]) -> None:
    assert (
        convert(write_parts(tmp_path / "a", encoder=draw(4), decoder=draw(4)), tmp_path / "b").exit_code == 0
    )
    config = json.loads((tmp_path / "b" / CONFIG).read_text())
    (tmp_path / "b" / CONFIG).write_text(json.dumps({**config, **changed}))
    assert CONFIG in refusal(tmp_path / "b", tmp_path / "c")


def test_files_without_a_prompt_are_refused(tmp_path: Path) -> None:
    nothing = tmp_path / "nothing"
    nothing.mkdir()
    target = tmp_path / "target"
    for source in (nothing, tmp_path / "none"):
        assert str(source) in refusal(source, target)
    flat = write_parts(tmp_path / "flat", decoder=torch.zeros(4))
    assert refusal(flat, target) == f"{flat}: Invalid prefix embedding tensor"
    torn = write_parts(tmp_path / "torn", decoder=draw(4))
    (torn / "decoder.pt").write_bytes((torn / "decoder.pt").read_bytes()[:100])
    refusal(torn, target)
    lora = tmp_path / "lora"
    lora.mkdir()
    (lora / CONFIG).write_text('{"peft_type": "LORA"}')
    save_file({"base_model.model.x.lora_A.weight": draw(4)}, lora / WEIGHTS)
    assert refusal(lora, target) == f"{lora} has peft_type LORA; only soft prompts can be converted"


def test_a_directory_that_cannot_be_written_to(tmp_path: Path) -> None:
    source = write_parts(tmp_path / "a", decoder=draw(4))
    (tmp_path / "file").write_text("")
    assert "cannot be written to" in refusal(source, tmp_path / "file" / "b")
    assert "cannot be written to" in refusal(source, tmp_path / "file")
