"""Chooses the kernels of products with codes and bfloat16 arithmetic when a shard starts: those on AMX tiles
if they return correct products."""

import logging
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from tgis.shard.checkpoint.codes import CodeLayout, Codes
from tgis.shard.checkpoint.tensors import ALL
from tgis.shard.kernels.cpu.codes import product
from tgis.shard.kernels.cpu.codes.tile_kernels import CodeTileKernels
from tgis.shard.kernels.cpu.codes.tiles.kernels import KERNELS_ON_TILES
from tgis.shard.kernels.cpu.replaced import warn_without_amx

logger = logging.getLogger(__name__)

REPLACED = "multiply_4_bits_on_tiles"  # name of the kernel that is checked for all
# Sizes of the products of the self-check.
_ROWS = (1, 19)
_IN_FEATURES, _GROUP = 212, 32
_OUT_FEATURES = 70
_BOUND = 1e-6  # of errors, as a fraction of the sum of absolute products


class TileKernels(NamedTuple):
    by_bits: Mapping[int, CodeTileKernels]
    replaced: tuple[str, ...] = ()
    """Names of kernels that failed the self-check."""


class _RandomCodes:
    """Stored weight of random codes."""

    label = "random codes"
    shape = (_OUT_FEATURES, _IN_FEATURES)

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        values = torch.randint(-8, 8, self.shape, generator=generator).to(torch.int8)
        scales = torch.rand(_OUT_FEATURES, -(-_IN_FEATURES // _GROUP), generator=generator)
        self._codes = Codes(CodeLayout(torch.int8, 4, _GROUP), values, scales)

    def read(self, rows: slice = ALL, columns: slice = ALL) -> Tensor:
        return self._codes.dequantize()[rows, columns]

    def layout(self, columns: slice = ALL) -> CodeLayout:
        return self._codes.layout

    def codes(self, rows: slice = ALL, columns: slice = ALL) -> Codes:
        return Codes(self._codes.layout, self._codes.values[rows], self._codes.scales[rows])


def choose_tile_kernels(
    has_tiles: bool, kernels: Mapping[int, CodeTileKernels] = KERNELS_ON_TILES
) -> TileKernels:
    """Return the kernels on tiles by the bits of codes, or none. `has_tiles` is True if AMX may be used."""
    if not has_tiles or not kernels:
        return TileKernels({})
    if is_near(kernels):
        logger.info("products with codes of 2 to 8 bits use AMX tiles")
        return TileKernels(kernels)
    warn_without_amx(REPLACED, "AMX_BF16")
    return TileKernels({}, (REPLACED,))


def is_near(kernels: Mapping[int, CodeTileKernels]) -> bool:
    """Return True if a small random product is correct within the rounding of float32, and its rows do not
    depend on each other."""
    weight = _RandomCodes()
    multiply = product.pack(weight, tile_kernels=kernels)
    x = torch.randn(max(_ROWS), _IN_FEATURES, generator=torch.Generator().manual_seed(1))
    numbers, wide = weight.read().double(), x.bfloat16().double()
    bound = _BOUND * (wide.abs() @ numbers.T.abs())
    y = multiply(x)
    is_correct = bool(((y - wide @ numbers.T).abs() <= bound).all())
    return is_correct and all(torch.equal(multiply(x[:count]), y[:count]) for count in _ROWS)
