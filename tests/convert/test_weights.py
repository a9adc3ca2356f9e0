"""`convert-to-safetensors`: equal tensors, and no files after an error."""

import json
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from click.testing import CliRunner
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from tests.support.shard.checkpoints import SMALL, randomise
from tgis.cli.models import convert_to_safetensors
from tgis.convert.weights import new_name


def convert(directory: Path, code: int = 0) -> str:
    """Return the command's output on the stream of its exit code."""
    result = CliRunner().invoke(convert_to_safetensors, [str(directory)], catch_exceptions=False)
    assert result.exit_code == code, result.stderr
    lines = [line for line in result.stderr.splitlines() if " INFO " not in line]
    assert len(lines) == (code != 0)
    return lines[0].removeprefix("error: ") if lines else result.stdout.removesuffix("\n")


def write_index(directory: Path, files: dict[str, dict[str, Tensor]], **also: str) -> Path:
    for name, tensors in files.items():
        torch.save(tensors, directory / name)
    file_of = {name: file for file, tensors in files.items() for name in tensors} | also
    index = directory / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": file_of}))
    return index


def split(tensors: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    names = list(tensors)
    parts = names[: len(names) // 2], names[len(names) // 2 :]
    return {
        f"pytorch_model-{i:05}-of-00002.bin": {name: tensors[name] for name in part}
        for i, part in enumerate(parts, 1)
    }


@pytest.fixture(scope="module")
def model() -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, tie_word_embeddings=True))
    randomise(model)
    return model


@pytest.mark.parametrize("is_split", [False, True])
def test_transformers_reads_the_same_from_both(
    model: transformers.PreTrainedModel, tmp_path: Path, is_split: bool
) -> None:
    model.config.save_pretrained(tmp_path)
    if is_split:
        write_index(tmp_path, split(model.state_dict()))
    else:
        torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    pickles = list(tmp_path.glob("*.bin"))
    before = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert convert(tmp_path) == f"Converted {len(pickles)} files to .safetensors"
    for path in pickles:
        assert (tmp_path / new_name(path.name)).stat().st_mode == path.stat().st_mode
        path.unlink()
    after = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert before.keys() == after.keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])
        assert torch.equal(tensor, after[name])


def test_names_of_the_files() -> None:
    assert new_name("pytorch_model.bin") == "model.safetensors"
    assert new_name("pytorch_model-00001-of-00002.bin") == "model-00001-of-00002.safetensors"
    assert new_name("decoder.bin") == "decoder.safetensors"
    assert new_name("pytorch_model.bin.index.json") == "model.safetensors.index.json"
    assert new_name("dixie.bin.index.json") == "dixie.safetensors.index.json"


@pytest.mark.parametrize(
    ("architecture", "kept", "removed"),
    [
        ("T5ForConditionalGeneration", "shared.weight", ["encoder.embed_tokens.weight", "lm_head.weight"]),
        ("LlamaForCausalLM", "model.embed_tokens.weight", ["lm_head.weight"]),
        ("NobodyKnowsIt", "a.weight", ["b.weight", "lm_head.weight"]),
        (None, "lm_head.weight", ["model.embed_tokens.weight"]),
    ],
)
def test_which_name_a_shared_tensor_keeps(
    tmp_path: Path, architecture: str | None, kept: str, removed: list[str]
) -> None:
    if architecture:
        (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    shared = torch.randn(4, 4)
    content = dict.fromkeys(sorted([kept, *removed]), shared) | {"own": torch.randn(3)}
    index = write_index(tmp_path, {"pytorch_model.bin": content})
    convert(tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as written:
        assert set(written.keys()) == {kept, "own"}
        assert written.metadata() == {"format": "pt", **dict.fromkeys(removed, kept)}
        assert torch.equal(written.get_tensor(kept), shared)
    rewritten = json.loads((tmp_path / new_name(index.name)).read_text())
    assert rewritten["weight_map"] == dict.fromkeys([kept, "own"], "model.safetensors")
    assert rewritten["metadata"] == {"total_size": 4 * (16 + 3)}


@pytest.mark.parametrize("is_zip", [True, False])
def test_every_kind_of_tensor(tmp_path: Path, is_zip: bool) -> None:
    base = torch.randn(6, 8)
    content = {
        "nan": torch.tensor([float("nan"), -0.0]),
        "half": torch.randn(3, 5).half(),
        "bfloat16": torch.randn(3, 5).bfloat16(),
        "bytes": torch.arange(7, dtype=torch.uint8),
        "scalar": torch.tensor(3),
        "empty": torch.empty(0, 4),
        "none": torch.empty(0),
        "whole": base,
        "part": base[2:4],
        "same start": base[:2],
        "transposed": base.T,
        "column": torch.randn(4, 4)[:, 1],
        "parameter": torch.nn.Parameter(torch.randn(2)),
    }
    torch.save(content, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=is_zip)
    convert(tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    assert written.keys() == content.keys()
    for name, tensor in content.items():
        assert written[name].dtype == tensor.dtype
        assert written[name].shape == tensor.shape
        assert written[name].tolist().__repr__() == tensor.tolist().__repr__()


def test_where_there_is_nothing_to_do(tmp_path: Path) -> None:
    for name in ("training_args.bin", "optimizer.bin", "scheduler.bin", "arguments.bin", "x_args.bin"):
        (tmp_path / name).write_bytes(b"\x80")
    assert convert(tmp_path) == "No pytorch .bin files found to convert"
    torch.save({"x": torch.ones(1)}, tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    text = "Existing model.safetensors.index.json file found, remove it first to reconvert"
    assert convert(tmp_path) == text
    (tmp_path / "other.safetensors").write_bytes(b"")
    assert convert(tmp_path) == "Existing .safetensors weights found, remove them first to reconvert"
    for name in ("a.bin.index.json", "b.bin.index.json"):
        (tmp_path / name).write_text("{}")
    text = "Found more than one .bin.index.json file: ['a.bin.index.json', 'b.bin.index.json']"
    assert convert(tmp_path) == text


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    text = "Weights not found in local cache for model nobody/x"
    assert convert(Path("nobody/x"), code=1) == text


class Payload:
    """The path leads to a file beside the directory."""

    def __init__(self, file: Path) -> None:
        self.trace = file.with_name("never")

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.trace}",)


def write_good(file: Path) -> bytes:
    torch.save({"a": torch.arange(5000.0), "b": torch.ones(3)}, file)
    return file.read_bytes()


def write_payload(file: Path) -> None:
    torch.save({"a": torch.ones(1), "b": Payload(file)}, file)


def write_bare_payload(file: Path) -> None:
    file.write_bytes(pickle.dumps({"a": Payload(file)}))


def write_half(file: Path) -> None:
    content = write_good(file)
    file.write_bytes(content[: len(content) // 2])


def write_most(file: Path) -> None:
    file.write_bytes(write_good(file)[:-1])


def write_half_of_old_kind(file: Path) -> None:
    torch.save({"a": torch.arange(5000.0)}, file, _use_new_zipfile_serialization=False)
    file.write_bytes(file.read_bytes()[:9000])


def write_flipped(file: Path) -> None:
    content = bytearray(write_good(file))
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def write_nothing(file: Path) -> None:
    file.write_bytes(b"")


def write_page(file: Path) -> None:
    file.write_text("version https://git-lfs.github.com/spec/v1\n")


DAMAGED = "{file} cannot be read: it is truncated or damaged"
REFUSED = "{file} calls "
INCOMPLETE = "the checkpoint is truncated or damaged"


@pytest.mark.parametrize(
    ("write", "text"),
    [
        (write_payload, REFUSED),
        (write_bare_payload, "{file} "),
        (write_half, DAMAGED),
        (write_most, DAMAGED),
        (write_half_of_old_kind, DAMAGED),
        (
            write_flipped,
            "{file} is damaged: its member pytorch_model-00002-of-00002/data/0 has a wrong checksum",
        ),
        (write_nothing, DAMAGED),
        (write_page, DAMAGED),
        (lambda file: torch.save([torch.ones(1)], file), "{file} is not a mapping of names to tensors"),
        (lambda file: torch.save({"a": {"b": torch.ones(1)}}, file), "{file}: a is not a plain tensor"),
        (lambda file: torch.save({"c": torch.ones(1).to_sparse()}, file), "{file}: c is not a plain tensor"),
    ],
)
def test_a_file_that_cannot_be_converted(tmp_path: Path, write: Callable[[Path], None], text: str) -> None:
    torch.save({"good": torch.ones(2)}, tmp_path / "pytorch_model-00001-of-00002.bin")
    file = tmp_path / "pytorch_model-00002-of-00002.bin"
    write(file)
    before = sorted(tmp_path.iterdir())
    said = convert(tmp_path, code=1)
    assert said.startswith(text.format(file=file))
    assert "weights_only" not in said
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("also", "text"),
    [
        ({"z": "other.bin"}, f"names other.bin, which does not exist: {INCOMPLETE}"),
        (
            {"z": "pytorch_model.bin"},
            f"names z, which pytorch_model.bin does not contain: {INCOMPLETE}",
        ),
    ],
)
def test_an_index_that_promises_too_much(tmp_path: Path, also: dict[str, str], text: str) -> None:
    index = write_index(tmp_path, {"pytorch_model.bin": {"a": torch.ones(2)}}, **also)
    before = sorted(tmp_path.iterdir())
    assert convert(tmp_path, code=1) == f"{index} {text}"
    assert sorted(tmp_path.iterdir()) == before
    index.write_text("[]")
    assert convert(tmp_path, code=1) == f"{index} is not a JSON object"


@pytest.mark.slow
def test_a_signal_leaves_nothing(tmp_path: Path) -> None:
    file = tmp_path / "pytorch_model.bin"
    os.mkfifo(file)  # reading it takes as long as the test needs
    command = [sys.executable, "-m", "tgis", "convert-to-safetensors", str(tmp_path)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not any(tmp_path.glob(".convert-*")):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err.splitlines()[-1]) == (1, "error: interrupted by SIGTERM")
    assert list(tmp_path.iterdir()) == [file]


def test_a_failure_between_two_moves_leaves_nothing(tmp_path: Path) -> None:
    """The index cannot be written because a directory has its name."""
    index = write_index(tmp_path, {"pytorch_model.bin": {"a": torch.ones(2)}})
    index.rename(tmp_path / "other.bin.index.json")
    (tmp_path / "other.safetensors.index.json").mkdir()
    before = sorted(tmp_path.iterdir())
    assert convert(tmp_path, code=1) == f"{tmp_path} cannot be written to: Is a directory"
    assert sorted(tmp_path.iterdir()) == before


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Create a file of three million bytes."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3000k", "none", tmp_path], check=True)
    yield tmp_path
    subprocess.run(["umount", "--lazy", tmp_path], check=True)  # the memory map may still exist


def test_a_disk_that_is_full(small_disk: Path) -> None:
    file = small_disk / "pytorch_model.bin"
    torch.save({"a": torch.randn(500_000)}, file)
    text = convert(small_disk, code=1)
    assert re.fullmatch(f"{file}: model.safetensors cannot be written: .*No space left on device.*", text)
    assert list(small_disk.iterdir()) == [file]
