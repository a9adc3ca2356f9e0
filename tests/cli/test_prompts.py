"""`check-prompt`, on files that PEFT wrote and on damaged ones."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from transformers import AutoModelForCausalLM

from tests.support.shard.checkpoints import write_llama, write_model
from tests.support.shard.family_cases.all import CASES
from tests.support.shard.gguf_writer import write_gguf
from tgis.cli import main as cli


def check(path: Path, *flags: str, env: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(
        cli.server_main, ["check-prompt", str(path), *flags], env={"HOME": None, **(env or {})}
    )


def lines(path: Path, *flags: str) -> list[str]:
    result = check(path, *flags)
    assert result.exit_code == 0, result.output
    return result.stdout.splitlines()


def refusal(path: Path, *flags: str, env: dict[str, str] | None = None) -> str:
    result = check(path, *flags, env=env)
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    [line] = result.stderr.splitlines()
    return line.removeprefix("error: ")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a prompt 32 wide, for a model of 512 tokens."""
    directory = tmp_path_factory.mktemp("model")
    write_llama(directory)
    return directory


@pytest.fixture(scope="module")
def seq2seq(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("seq2seq")
    write_model(directory, CASES["t5"]())
    return directory


@pytest.fixture(scope="module")
def lora(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("lora")
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=4,
        lora_alpha=8,
        target_modules=["q_proj", "down_proj"],
        rank_pattern={"down_proj": 2},
    )
    get_peft_model(AutoModelForCausalLM.from_pretrained(model), config).save_pretrained(directory)
    return directory


def write_prompt(directory: Path, name: str = "decoder.pt", rows: int = 6, width: int = 32) -> Path:
    directory.mkdir(exist_ok=True)
    torch.save(torch.ones(rows, width), directory / name)
    return directory


def test_a_model_in_a_gguf_file(lora: Path, tmp_path: Path) -> None:
    write_llama(tmp_path / "model")
    file = tmp_path / "model.gguf"
    write_gguf(tmp_path / "model", file, "llama")
    prompt = write_prompt(tmp_path / "prompt")
    for place in (file, tmp_path):
        assert lines(prompt, "--model", str(place)) == [*lines(prompt), f"fits {file}"]
    assert lines(lora, "--model", str(file)) == [*lines(lora), f"fits {file}"]
    wide = write_prompt(tmp_path / "wide", width=40)
    assert refusal(wide, "--model", str(file)).startswith(f"{wide}: ")
    file.write_bytes(b"GGUF")
    assert refusal(prompt, "--model", str(file)).startswith(f"{file} ")


def test_a_prompt(model: Path, tmp_path: Path) -> None:
    prompt = write_prompt(tmp_path / "prompt")
    expected = ["soft prompt: 6 virtual tokens for the decoder", "1024 bytes", "  decoder  [6, 32] float32"]
    assert lines(prompt) == expected
    assert lines(prompt / "decoder.pt") == expected
    assert lines(prompt, "--model", str(model)) == [*expected, f"fits {model}"]
    half = [expected[0], "512 bytes", *expected[2:], f"fits {model}"]
    assert lines(prompt, "--model", str(model), "--dtype", "bfloat16") == half
    (prompt / "decoder.pt").rename(prompt / "any name.pt")
    assert lines(prompt / "any name.pt") == expected


def test_prompts_written_by_peft(model: Path, tmp_path: Path) -> None:
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5)
    base = AutoModelForCausalLM.from_pretrained(model)
    get_peft_model(base, config).save_pretrained(tmp_path)
    printed = lines(tmp_path, "--model", str(model))
    assert printed[0] == "soft prompt: 5 virtual tokens for the decoder"
    assert lines(tmp_path / "adapter_model.safetensors", "--model", str(model)) == printed


def test_a_prompt_of_both_sides(seq2seq: Path, tmp_path: Path) -> None:
    write_prompt(tmp_path, "encoder.pt", rows=4)
    write_prompt(tmp_path)
    printed = lines(tmp_path, "--model", str(seq2seq))
    assert printed[0] == "soft prompt: 6 virtual tokens for the decoder and 4 virtual tokens for the encoder"
    assert printed[2:4] == ["  decoder  [6, 32] float32", "  encoder  [4, 32] float32"]
    write_prompt(tmp_path, rows=5)
    assert refusal(tmp_path, "--model", str(seq2seq)) == (
        f"{tmp_path}: Encoder/decoder prefix tensor must be of even length"
    )


def test_an_adapter(model: Path, lora: Path) -> None:
    printed = lines(lora)
    assert printed[0] == "LoRA adapter: 4 modules"
    assert set(printed[1:3]) == {"rank 4, scale 2: q_proj (2)", "rank 2, scale 4: down_proj (2)"}
    assert printed[3] == f"{2 * 2 * 2 * 512} bytes"
    assert "  model.layers.1.mlp.down_proj.lora_A.weight     [2, 48] float32" in printed
    assert lines(lora, "--model", str(model)) == [*printed, f"fits {model}"]
    assert lines(lora / "adapter_config.json") == printed


def damaged(lora: Path, tmp_path: Path, change: Callable[[Path], object]) -> Path:
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in lora.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    change(copy)
    return copy


def edit(**changed: object) -> Callable[[Path], object]:
    def change(directory: Path) -> None:
        file = directory / "adapter_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changed}))

    return change


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (edit(target_modules=r"((.|..)+)+\d{3}"), ": invalid adapter: target_modules of adapter_config.json"),
        (edit(use_dora=True), ": weight-decomposed LoRA (DoRA) is not supported"),
        (edit(peft_type="IA3"), ": adapter type IA3 is not currently supported"),
        (edit(r=3, rank_pattern={}), "expected rank 3"),
        (lambda path: (path / "adapter_model.safetensors").write_bytes(b"\xff" * 20), " is too large"),
        (lambda path: (path / "adapter_model.safetensors").unlink(), "adapter_model.bin found"),
    ],
)
def test_a_bad_adapter(lora: Path, tmp_path: Path, change: Callable[[Path], object], text: str) -> None:
    copy = damaged(lora, tmp_path, change)
    line = refusal(copy)
    assert line.startswith(str(copy))
    assert text in line


def test_links_out_of_the_directory(lora: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    linked, blobs = store / "linked", store / "blobs"
    for directory in (linked, blobs):
        directory.mkdir(parents=True)
    for file in lora.iterdir():
        (linked / file.name).symlink_to(file)
    refused = f"{linked / 'adapter_config.json'} links to a file outside"
    assert refusal(linked).startswith(f"{refused} {linked}")
    assert refusal(linked / "adapter_config.json").startswith(f"{refused} {linked}")
    assert refusal(linked, "--store", str(store)).startswith(f"{refused} {store}")
    assert lines(linked, "--store", str(lora.parent.parent)) == lines(lora)
    for file in lora.iterdir():
        (blobs / file.name).write_bytes(file.read_bytes())
        (linked / file.name).unlink()
        (linked / file.name).symlink_to(f"../blobs/{file.name}")
    assert lines(linked, "--store", str(store)) == lines(lora)
    assert refusal(lora, "--store", str(store)).startswith(f"{lora} is outside {store}")


def test_an_adapter_of_another_model(lora: Path, seq2seq: Path, tmp_path: Path) -> None:
    assert "it is for another model" in refusal(lora, "--model", str(seq2seq))
    wider = tmp_path / "wider"
    write_llama(wider, hidden_size=64)
    assert "it is for another model" in refusal(lora, "--model", str(wider))
    assert "exceeds the allowed" not in refusal(lora, "--model", str(wider))


def test_a_bad_prompt(model: Path, tmp_path: Path) -> None:
    prompt, fits = tmp_path / "prompt", ("--model", str(model))
    write_prompt(prompt, width=33)
    assert refusal(prompt, *fits) == f"{prompt}: Prefix embedding tensor dim 33 does not match model (32)"
    assert lines(prompt)
    write_prompt(prompt, rows=257)
    assert refusal(prompt, *fits) == f"{prompt}: Invalid prefix embedding length of 257"
    assert lines(prompt, *fits, "--max-sequence-length", "513")
    write_prompt(prompt, "encoder.pt")
    (prompt / "decoder.pt").unlink()
    assert refusal(prompt, *fits) == f"{prompt} contains no soft prompt and no adapter for such a model"
    torch.save(torch.full((4, 32), 1e30), prompt / "decoder.pt")
    text = "Prefix contains non-finite elements after conversion from torch.float32 to torch.float16"
    assert refusal(prompt, *fits, "--dtype", "float16") == f"{prompt}: {text}"
    torch.save(torch.full((4, 32), float("nan")), prompt / "decoder.pt")
    assert refusal(prompt) == f"{prompt}: Prefix contains non-finite elements"
    (prompt / "decoder.pt").write_bytes(b"PK\x03\x04 torn")
    assert refusal(prompt) == f"{prompt}: Invalid prefix embedding tensor"


def test_limits_of_a_deployment(model: Path, tmp_path: Path) -> None:
    prompt, fits = write_prompt(tmp_path / "prompt", rows=8), ("--model", str(model))
    assert refusal(prompt, *fits, env={"MAX_PROMPT_PREFIX_LENGTH": "7"}).endswith("length of 8")
    assert check(prompt, *fits, env={"MAX_PROMPT_PREFIX_LENGTH": "8"}).exit_code == 0
    long = write_prompt(tmp_path / "long", rows=9000)
    flags = (*fits, "--max-sequence-length", "18000", "--prompt-cache-size-mb", "1")
    assert refusal(long, *flags) == f"{long} exceeds the allowed cache size"
    assert lines(long, *flags, "--dtype", "bfloat16")


def test_missing_files(model: Path, tmp_path: Path) -> None:
    assert refusal(tmp_path) == f"{tmp_path} contains no soft prompt and no adapter"
    for flags in ((), ("--model", str(model))):
        none = tmp_path / "none"
        assert refusal(none, *flags) == f"there is no such file or directory: {none}"
    assert "Model nobody/x not found" in refusal(tmp_path, "--model", "nobody/x")
    assert check(tmp_path, "--dtype", "int3").exit_code == 2
