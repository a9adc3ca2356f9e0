"""Matrices of GGUF types for tests of products."""

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor

from tests.support.shard.gguf_writer import make_blocks
from tgis.shard.checkpoint.codes import Codes
from tgis.shard.checkpoint.gguf.tensor import GgufTensor
from tgis.tensor_files.gguf_types import TYPES

NUM_ROWS, NUM_COLUMNS = 70, 1024


def make_tensor(name: str, num_rows: int = NUM_ROWS) -> tuple[GgufTensor, Tensor]:
    """Return a matrix of a type, and its values by the package."""
    weights = np.random.default_rng(0).standard_normal((num_rows, NUM_COLUMNS), np.float32)
    rows = make_blocks(weights, Type[name])
    kind = next(each for each in TYPES.values() if each.name == name)
    tensor = GgufTensor(lambda: rows, (num_rows, NUM_COLUMNS), kind, "a weight", lambda *_: None)
    return tensor, torch.from_numpy(gguf.dequantize(rows, Type[name]))


def count_magnitudes(codes: Codes) -> Tensor:
    """Return the sums of magnitudes of all terms of a product. Half their range is subtracted from codes."""
    assert codes.layout.group is not None
    if codes.layout.table:
        numbers = torch.tensor(codes.layout.table, dtype=torch.float64)[codes.values.long()]
    else:
        numbers = codes.values.double()
    centre = 1 << (codes.layout.bits - 1) if codes.offsets is not None else 0
    groups = torch.arange(codes.values.shape[1]) // codes.layout.group
    actual = (numbers - centre).abs() * codes.scales[:, groups].double().abs()
    if codes.offsets is not None:
        actual += (codes.offsets.double().abs() + centre * codes.scales.double().abs())[:, groups]
    return actual
