"""Check that .bin checkpoints give their tensors, and that no other code in them ever runs."""

import json
import os
import pickle
import tarfile
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.support.shard.stored_tensors import SOURCES, check_slices, fail, save_single, tensors
from tgis.shard.checkpoint.tensors import WeightsError
from tgis.shard.checkpoint.weights import Weights
from tgis.tensor_files.errors import TensorFileError
from tgis.tensor_files.safe_pickle import open_pickle

BIN = "pytorch_model.bin"
DAMAGED = "cannot be read: it is truncated or damaged"


class Payload:
    """An object that creates a directory when something unpickles it."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> object:
        return os.mkdir, (str(self.path),)


def save(directory: Path, content: object, is_zip: bool = True) -> Path:
    torch.save(content, directory / BIN, _use_new_zipfile_serialization=is_zip)
    return directory / BIN


@pytest.mark.parametrize("is_zip", [True, False])
def test_reads_slices(is_zip: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    content = tensors()
    turned = torch.randn(4, 10).T  # not contiguous
    save(tmp_path, {**content, "model.embed_tokens.weight": nn.Parameter(turned), "epoch": 3}, is_zip)
    weights = Weights(tmp_path, SOURCES)
    check_slices(weights, "embed.weight", turned)
    packed = torch.cat([content[f"model.layers.3.{x}.weight"] for x in "qk"])
    check_slices(weights, "blocks.3.qkv.weight", packed)
    assert ("old format" in caplog.text) is not is_zip


def test_reads_several_files(tmp_path: Path) -> None:
    content = tensors()
    names = sorted(content)
    file_of = {name: f"pytorch_model-0000{i % 2 + 1}-of-00002.bin" for i, name in enumerate(names)}
    for file in set(file_of.values()):
        torch.save({name: content[name] for name in names if file_of[name] == file}, tmp_path / file)
    file_of["model.layers.3.k.weight"] = file_of["model.embed_tokens.weight"]
    (tmp_path / f"{BIN}.index.json").write_text(json.dumps({"weight_map": file_of}))
    weights = Weights(tmp_path, SOURCES)
    check_slices(weights, "blocks.11.out.weight", content["model.layers.11.o.weight"])
    check_slices(weights, "embed.weight", content["model.embed_tokens.weight"])
    if file_of["model.layers.3.q.weight"] != file_of["model.layers.3.k.weight"]:
        with pytest.raises(WeightsError, match=r"k\.weight is in the index, but not in the file: "):
            weights.find("blocks.3.qkv.weight", (8, 4))


def test_safetensors_go_first(tmp_path: Path) -> None:
    content = tensors()
    save(tmp_path, {"model.embed_tokens.weight": torch.zeros(10, 4)})
    save_single(tmp_path, content)
    check_slices(Weights(tmp_path, SOURCES), "embed.weight", content["model.embed_tokens.weight"])


@pytest.mark.parametrize("is_zip", [True, False])
def test_a_payload_is_not_run(is_zip: bool, tmp_path: Path) -> None:
    file = save(tmp_path, {**tensors(), "x": Payload(tmp_path / "harm")}, is_zip)
    assert fail(tmp_path) == f"{file} calls posix.mkdir, which tensors do not need; it was not run"
    torch.load(file, weights_only=False)
    assert (tmp_path / "harm").exists(), "the payload is harmless by itself"


@pytest.mark.parametrize("share", [0, 3, 0.5, 0.99])
@pytest.mark.parametrize("is_zip", [True, False])
def test_names_a_truncated_file(share: float, is_zip: bool, tmp_path: Path) -> None:
    file = save(tmp_path, tensors(), is_zip)
    content = file.read_bytes()
    file.write_bytes(content[: int(share if share > 1 else share * len(content))])
    assert fail(tmp_path).startswith(f"{file} {DAMAGED}")


def test_names_an_old_file_that_is_cut_anywhere(tmp_path: Path) -> None:
    """Check every cut, including one inside a constructor's name, which leaves the name of an unknown
    call."""
    file = tmp_path / BIN
    content = {"model.embed_tokens.weight": torch.zeros(10, 4)}
    torch.save(content, file, _use_new_zipfile_serialization=False)
    whole = file.read_bytes()
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        with pytest.raises(TensorFileError) as caught:
            open_pickle(file)
        assert str(caught.value).startswith(f"{file} {DAMAGED}")


def test_names_files_that_are_no_pickle_of_tensors(tmp_path: Path) -> None:
    file = tmp_path / BIN
    for content in (b"\x7fELF", b"hello", pickle.dumps({1: 2}), b"PK\x03\x04" + bytes(100)):
        file.write_bytes(content)
        assert str(file) in fail(tmp_path)
    with tarfile.open(file, "w") as archive:
        archive.add(__file__)
    assert fail(tmp_path).startswith(f"{file} {DAMAGED}")
    save(tmp_path, [torch.zeros(10, 4)])
    assert fail(tmp_path) == f"{file} is not a mapping of names to tensors"
    save(tmp_path, {"model.embed_tokens.weight": torch.eye(10, 4).to_sparse()})
    assert fail(tmp_path) == f"{tmp_path}: tensor model.embed_tokens.weight is missing"
    save(tmp_path, {"model.embed_tokens.weight": torch.zeros(10, 4, dtype=torch.float64)})
    text = "is stored as float64, expected one of float32, float16, bfloat16"
    assert fail(tmp_path) == f"{file}: tensor model.embed_tokens.weight {text}"
