"""Small checkpoint of plain tensors, and checks of its parts."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tgis.shard.checkpoint.tensors import Stored, WeightsError
from tgis.shard.checkpoint.weights import Source, Weights, stack

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


def fail(directory: Path, path: str = "embed.weight", shape: tuple[int, ...] = (10, 4)) -> str:
    """Return the text of the error, which must be one line."""
    return refuse(lambda: Weights(directory, SOURCES).find(path, shape).read())


def refuse(act: Callable[[], object]) -> str:
    """Return the text of the error, which must be one line."""
    with pytest.raises(WeightsError) as caught:
        act()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def check_slices(weights: Weights, path: str, expected: Tensor) -> None:
    """Check that random parts of a tensor equal those of the whole, which was computed differently."""
    check_parts(weights.find(path, tuple(expected.shape)), expected)


def check_parts(stored: Stored, expected: Tensor) -> None:
    rng = random.Random(0)
    assert torch.equal(stored.read(), expected)
    for _ in range(60):
        cuts = [sorted((rng.randint(0, n), rng.randint(0, n))) for n in expected.shape]
        part = tuple(slice(start, stop) for start, stop in cuts)
        read = stored.read(*part)
        assert torch.equal(read, expected[part])
        assert read.is_contiguous()
