"""Chooses the kernel of products with bfloat16 arithmetic when a shard starts: the processor's instructions,
if they return the bits of the reference."""

import logging
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from tgis.shard.checkpoint.tensors import TensorInMemory
from tgis.shard.kernels.cpu.bf16 import kernels, tile_product, tiles
from tgis.shard.kernels.cpu.bf16.product import Packer, pack_rounded, pairs_packer
from tgis.shard.kernels.cpu.replaced import warn_of_rounding, warn_without_amx

logger = logging.getLogger(__name__)

REPLACED = "multiply_pairs"  # name of the kernel that may be replaced
REPLACED_TILES = "multiply_tiles"
# Sizes of the products of the self-check.
_ROWS = (1, 14, 50)
_IN_FEATURES = 71
_OUT_FEATURES = 40


class PackerChoice(NamedTuple):
    pack: Packer
    replaced: tuple[str, ...] = ()
    """Names of kernels that failed the self-check."""


def choose_packer(has_tiles: bool = False) -> PackerChoice:
    """Return the packer of the fastest correct kernel on this processor. `has_tiles` is True if AMX may be
    used."""
    if not has_tiles or tiles.TILE_KERNELS is None:
        return _choose_without_tiles()
    pack = partial(tile_product.pack, kernels=tiles.TILE_KERNELS)
    if is_exact(pack, multiply_plainly_by_tiles):
        logger.info("products with bfloat16 arithmetic use AMX tiles")
        return PackerChoice(pack)
    warn_without_amx(REPLACED_TILES, "AMX_BF16")
    choice = _choose_without_tiles()
    return choice._replace(replaced=(REPLACED_TILES, *choice.replaced))


def _choose_without_tiles() -> PackerChoice:
    if kernels.MULTIPLY_PAIRS is None:
        logger.warning(
            "the processor has no AVX512_BF16: bfloat16 arithmetic is emulated and slower than float32"
        )
        return PackerChoice(pack_rounded)
    pack = pairs_packer(kernels.MULTIPLY_PAIRS)
    if not is_exact(pack):
        warn_of_rounding(REPLACED)
        return PackerChoice(pack_rounded, (REPLACED,))
    return PackerChoice(pack)


def multiply_plainly(x: Tensor, weight: Tensor) -> Tensor:
    """Return the product of numbers rounded to bfloat16, added one after the other in float32.

    Each sum is computed in float64 and rounded to float32. Double rounding almost never changes the
    result."""
    x, weight = x.bfloat16().double(), weight.bfloat16().double()
    total = torch.zeros(len(x), len(weight))
    for column, factors in zip(x.T, weight.T, strict=True):
        total = (total + column.outer(factors)).float()
    return total


def multiply_plainly_by_tiles(x: Tensor, weight: Tensor) -> Tensor:
    """Return the product of numbers rounded to bfloat16 in the order of AMX: for each tile of columns, the
    sum of even columns plus the sum of odd columns."""
    total = torch.zeros(len(x), len(weight))
    for begin in range(0, x.shape[1], tiles.COLUMNS):
        halves = [slice(begin + first, begin + tiles.COLUMNS, 2) for first in range(2)]
        even, odd = (multiply_plainly(x[:, half], weight[:, half]) for half in halves)
        total += even + odd
    return total


def is_exact(pack: Packer, multiply: Callable[[Tensor, Tensor], Tensor] = multiply_plainly) -> bool:
    """Return True if small random products have the bits of the reference `multiply`."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(_OUT_FEATURES, _IN_FEATURES, generator=generator)
    x = torch.randn(max(_ROWS), _IN_FEATURES, generator=generator)
    product = pack(TensorInMemory(weight, "random numbers"))
    expected = multiply(x, weight)
    return all(torch.equal(product(x[:count]), expected[:count]) for count in _ROWS)
