"""Mapped tensors equal those that the library reads, and no memory is leaked."""

import gc
import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from tgis.tensor_files.mapped_safetensors import DTYPES, map_tensors


def test_tensors_equal_those_of_the_library(tmp_path: Path) -> None:
    tensors = {name: torch.arange(6).reshape(2, 3).to(dtype) for name, dtype in DTYPES.items()}
    tensors |= {
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(2.5),
        "odd": torch.ones(3, dtype=torch.int8),
    }
    save_file(tensors, tmp_path / "file", metadata={"a": "b"})
    (actual, metadata), expected = map_tensors(tmp_path / "file"), load_file(tmp_path / "file")
    assert metadata == {"a": "b"}
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (actual[name].dtype, actual[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(actual[name].float(), tensor.float())


def write(file: Path, header: object, data: bytes) -> Path:
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return file


@pytest.mark.parametrize("padding", range(4))
def test_elements_that_are_not_aligned(tmp_path: Path, padding: int) -> None:
    stored = torch.tensor([1.5, -2.0])
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    file = write(tmp_path / "file", {"a" * (padding + 1): entry}, stored.numpy().tobytes())
    assert torch.equal(map_tensors(file)[0]["a" * (padding + 1)], stored)


def test_damaged_files(tmp_path: Path) -> None:
    for entry in (
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 12]},
        {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]},
    ):
        with pytest.raises(SafetensorError):
            map_tensors(write(tmp_path / "file", {"a": entry}, b"\0" * 8))


@pytest.mark.slow
def test_nothing_stays(tmp_path: Path) -> None:
    save_file({f"{i}": torch.ones(300, 2) for i in range(400)}, tmp_path / "file")
    map_tensors(tmp_path / "file")
    gc.collect()
    before = sys.getallocatedblocks()
    for _ in range(4):
        map_tensors(tmp_path / "file")
    gc.collect()
    assert sys.getallocatedblocks() - before < 400
