"""Checkpoint of one quantized module, and random parts of it."""

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tgis.shard.checkpoint.files import Checkpoint
from tgis.shard.checkpoint.tensors import StoredTensor
from tgis.shard.quant.registry import find_format


def open_module(
    directory: Path, tensors: Mapping[str, Tensor], settings: Mapping[str, Any] | None
) -> StoredTensor:
    """Write the module's tensors by name suffix, and open its weight. Without settings, there is no
    `quantization_config`."""
    save_file({f"m.{end}": tensor for end, tensor in tensors.items()}, directory / "model.safetensors")
    format = find_format({"quantization_config": settings} if settings else {}, directory)
    assert format is not None
    result = format.open(Checkpoint(directory), "m")
    assert result is not None
    return result


def check_cuts(actual: StoredTensor, expected: Tensor, seed: int = 0) -> None:
    """Assert that parts of a matrix at random bounds equal those of the whole."""
    rng = random.Random(seed)
    cuts = [[slice(*sorted(rng.choices(range(size + 1), k=2))) for size in expected.shape] for _ in range(25)]
    for rows, columns in [*cuts, (slice(5, 6), slice(7, 8)), (slice(0), slice(None))]:
        part = actual.read(rows, columns)
        assert torch.equal(part, expected[rows, columns]), (rows, columns)
        assert part.is_contiguous()
