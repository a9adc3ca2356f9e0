"""Chooses the kernels of products with codes on AMX tiles when a shard starts: those with bfloat16 arithmetic
if they return correct products, and those with rounded activations if they return the same bits as products
without tiles."""

import logging
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from tgis.shard.checkpoint.codes import CodeLayout, Codes
from tgis.shard.checkpoint.tensors import ALL
from tgis.shard.kernels.cpu.codes import product
from tgis.shard.kernels.cpu.codes.layout import Kind
from tgis.shard.kernels.cpu.codes.tile_kernels import CodeTileKernels
from tgis.shard.kernels.cpu.codes.tiles.kernels import KERNELS_ON_TILES
from tgis.shard.kernels.cpu.replaced import warn_without_amx

logger = logging.getLogger(__name__)

# Names of the kernels that are checked for all.
REPLACED, REPLACED_ROUNDED = "multiply_4_bits_on_tiles", "multiply_4_bits_rounded_on_tiles"
# Sizes of the products of the self-check.
_ROWS, _ROUNDED_ROWS = (1, 19), (35, 64)
_IN_FEATURES, _GROUP = 212, 32
_OUT_FEATURES = 70
_BOUND = 1e-6  # of errors, as a fraction of the sum of absolute products


class TileKernels(NamedTuple):
    by_kind: Mapping[Kind, CodeTileKernels]
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
    has_tiles: bool, kernels: Mapping[Kind, CodeTileKernels] = KERNELS_ON_TILES
) -> TileKernels:
    """Return the kernels with bfloat16 arithmetic by the kind of products, or none. `has_tiles` is True if
    AMX may be used."""
    own = {kind: each for kind, each in kernels.items() if has_tiles and not kind.rounds_activations}
    return _choose(own, is_near, "products with codes of 2 to 8 bits use AMX tiles", REPLACED, "AMX_BF16")


def choose_rounded_kernels(
    has_tiles: bool, kernels: Mapping[Kind, CodeTileKernels] = KERNELS_ON_TILES
) -> TileKernels:
    """Return the kernels with rounded activations by the kind of products, or none."""
    own = {kind: each for kind, each in kernels.items() if has_tiles and kind.rounds_activations}
    use = "products of many rows with codes and rounded activations use AMX tiles"
    return _choose(own, is_same, use, REPLACED_ROUNDED, "AMX_INT8")


def _choose(
    own: Mapping[Kind, CodeTileKernels],
    is_right: Callable[[Mapping[Kind, CodeTileKernels]], bool],
    use: str,
    name: str,
    instructions: str,
) -> TileKernels:
    """Return the kernels if they pass a check, which is logged as `use`. Otherwise, they are replaced under a
    name."""
    if not own:
        return TileKernels({})
    if is_right(own):
        logger.info(use)
        return TileKernels(own)
    warn_without_amx(name, instructions)
    return TileKernels({}, (name,))


def is_near(kernels: Mapping[Kind, CodeTileKernels]) -> bool:
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


def is_same(kernels: Mapping[Kind, CodeTileKernels]) -> bool:
    """Return True if a small random product with rounded activations has the bits of one without tiles."""
    weight = _RandomCodes()
    actual, expected = (product.pack(weight, True, each) for each in (kernels, product.NO_KERNELS))
    x = torch.randn(max(_ROUNDED_ROWS), _IN_FEATURES, generator=torch.Generator().manual_seed(1))
    return all(torch.equal(actual(x[:count]), expected(x[:count])) for count in _ROUNDED_ROWS)
