"""Reading checkpoints: from one file or several, slices alone, and one clear line for every fault."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tgis.shard.weights import Source, Weights, WeightsError, stack

SOURCES: dict[str, Source] = {
    "embed": "model.embed_tokens",
    "blocks.{i}.qkv": stack("model.layers.{i}.q", "model.layers.{i}.k"),
    "blocks.{i}.out": "model.layers.{i}.o",
}


def tensors() -> dict[str, Tensor]:
    torch.manual_seed(0)
    shapes = {"model.embed_tokens.weight": (10, 4)}
    for i in range(12):
        shapes |= {
            f"model.layers.{i}.{name}.weight": shape
            for name, shape in (("q", (6, 4)), ("k", (2, 4)), ("o", (4, 6)))
        }
        shapes |= {f"model.layers.{i}.{name}.bias": (rows,) for name, rows in (("q", 6), ("k", 2))}
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def save_single(directory: Path, content: dict[str, Tensor]) -> None:
    save_file(content, directory / "model.safetensors")


def save_sharded(directory: Path, content: dict[str, Tensor]) -> None:
    names = sorted(content)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in halves.items():
        save_file({name: content[name] for name in part}, directory / file)
    index = {"weight_map": {name: file for file, part in halves.items() for name in part}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("save", [save_single, save_sharded])
def test_reads_slices_of_packed_tensors(save: object, tmp_path: Path) -> None:
    content = tensors()
    save(tmp_path, content)  # type: ignore[operator]
    weights = Weights(tmp_path, SOURCES)
    for layer in (1, 11):
        packed = torch.cat([content[f"model.layers.{layer}.{x}.weight"] for x in "qk"])
        stored = weights.find(f"blocks.{layer}.qkv.weight", (8, 4))
        for rows in (slice(0, 8), slice(2, 5), slice(4, 7), slice(6, 8), slice(7, 8)):
            assert torch.equal(stored.read(rows, slice(1, 3)), packed[rows, 1:3])
        bias = torch.cat([content[f"model.layers.{layer}.{x}.bias"] for x in "qk"])
        assert torch.equal(weights.find(f"blocks.{layer}.qkv.bias", (8,)).read(slice(5, 7)), bias[5:7])
    assert torch.equal(weights.find("blocks.0.out.weight", (4, 6)).read(), content["model.layers.0.o.weight"])
    assert torch.equal(
        weights.find("embed.weight", (10, 4)).read(slice(3, 9)), content["model.embed_tokens.weight"][3:9]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_gives_what_is_stored(dtype: torch.dtype, tmp_path: Path) -> None:
    save_single(tmp_path, {"model.embed_tokens.weight": torch.randn(10, 4).to(dtype)})
    assert Weights(tmp_path, SOURCES).find("embed.weight", (10, 4)).read().dtype == dtype


def test_does_not_read_what_is_not_asked_for(tmp_path: Path) -> None:
    """The file of `k` is broken; rows of `q` can be read all the same, those of `k` cannot."""
    content = tensors()
    save_sharded(tmp_path, content)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    broken = tmp_path / index["model.layers.0.o.weight"]
    assert index["model.embed_tokens.weight"] != broken.name
    broken.write_bytes(b"")
    weights = Weights(tmp_path, SOURCES)
    assert weights.find("embed.weight", (10, 4)).read().shape == (10, 4)
    with pytest.raises(
        WeightsError, match=rf"^{broken}: tensor model\.layers\.0\.o\.weight cannot be read: "
    ):
        weights.find("blocks.0.out.weight", (4, 6))


def fail(directory: Path, path: str = "embed.weight", shape: tuple[int, ...] = (10, 4)) -> str:
    """The text of the error, known to be one line."""
    with pytest.raises(WeightsError) as caught:
        Weights(directory, SOURCES).find(path, shape).read()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_names_what_is_missing_or_odd(tmp_path: Path) -> None:
    content = tensors()
    del content["model.layers.3.k.weight"]
    content["model.layers.4.k.weight"] = torch.zeros(2, 5)
    content["model.layers.5.o.weight"] = torch.zeros(4, 6, dtype=torch.int8)
    save_single(tmp_path, content)
    file = tmp_path / "model.safetensors"
    missing = fail(tmp_path, "blocks.3.qkv.weight", (8, 4))
    assert missing == f"{tmp_path}: tensor model.layers.3.k.weight is missing"
    assert fail(tmp_path, shape=(11, 4)) == (
        f"{file}: tensor model.embed_tokens.weight has shape [10, 4], expected [11, 4]"
    )
    assert fail(tmp_path, "blocks.0.qkv.weight", (9, 4)) == (
        f"{file}: tensor model.layers.0.q.weight + model.layers.0.k.weight has shape [8, 4], expected [9, 4]"
    )
    assert fail(tmp_path, "blocks.4.qkv.weight", (8, 4)) == (
        f"{file}: tensor model.layers.4.q.weight + model.layers.4.k.weight differ in width: [6, 4], [2, 5]"
    )
    assert fail(tmp_path, "blocks.5.out.weight", (4, 6)) == (
        f"{file}: tensor model.layers.5.o.weight is stored as I8, expected one of F32, F16, BF16"
    )


@pytest.mark.parametrize("keep", [0, 4, 100, -8])
def test_names_a_truncated_file(keep: int, tmp_path: Path) -> None:
    save_single(tmp_path, tensors())
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    assert fail(tmp_path).startswith(f"{file} cannot be read: ")


def test_names_a_corrupt_file(tmp_path: Path) -> None:
    save_single(tmp_path, tensors())
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"\xff" * 64 + file.read_bytes()[64:])
    assert fail(tmp_path).startswith(f"{file} cannot be read: ")


@pytest.mark.parametrize(
    ("index", "text"),
    [
        ("{", "is not an index of weights: "),
        ("{}", "is not an index of weights: 'weight_map'"),
        ('{"weight_map": ["a"]}', "is not an index of weights: "),
        ('{"weight_map": {"model.embed_tokens.weight": 3}}', "is not an index of weights: "),
        (
            '{"weight_map": {"model.embed_tokens.weight": "../a.safetensors"}}',
            "names a file outside its directory",
        ),
        (
            '{"weight_map": {"model.embed_tokens.weight": "/etc/passwd"}}',
            "names a file outside its directory",
        ),
    ],
)
def test_names_a_bad_index(index: str, text: str, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors.index.json"
    file.write_text(index)
    assert fail(tmp_path).startswith(f"{file} {text}")


def test_names_a_missing_file(tmp_path: Path) -> None:
    save_sharded(tmp_path, tensors())
    (tmp_path / "b.safetensors").unlink()
    (tmp_path / "a.safetensors").unlink()
    text = fail(tmp_path)
    assert "safetensors: tensor model.embed_tokens.weight cannot be read: " in text


def test_does_not_read_pickles(tmp_path: Path) -> None:
    torch.save(tensors(), tmp_path / "pytorch_model.bin")
    assert fail(tmp_path) == (
        f"no safetensors weights were found in {tmp_path}; pickles are not read, "
        "run `text-generation-server convert-to-safetensors`"
    )


def test_an_empty_directory_says_so(tmp_path: Path) -> None:
    expected = f"{tmp_path} holds neither model.safetensors nor model.safetensors.index.json"
    assert fail(tmp_path) == expected
