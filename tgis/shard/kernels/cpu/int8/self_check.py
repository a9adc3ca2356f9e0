"""Chooses the kernel of int8 products when a shard starts: the one with AMX if it returns the same bits."""

import logging
from typing import NamedTuple

import torch

from tgis.shard.checkpoint.tensors import TensorInMemory
from tgis.shard.kernels.cpu.int8 import kernels, product
from tgis.shard.kernels.cpu.jit.compiler import Kernel
from tgis.shard.kernels.cpu.replaced import warn_without_amx
from tgis.shard.quant.schemes.int8 import Rounded

logger = logging.getLogger(__name__)

REPLACED = "multiply_int8_tiles"  # name of the kernel that may be replaced
# Sizes of the products of the self-check.
_ROWS = (17, 50)
_IN_FEATURES = 212
_OUT_FEATURES = 40


class KernelChoice(NamedTuple):
    kernel: Kernel
    replaced: tuple[str, ...] = ()
    """Names of kernels that failed the self-check."""


def choose_kernel(has_tiles: bool) -> KernelChoice:
    """Return the fastest correct kernel on this processor. `has_tiles` is True if AMX may be used."""
    if not has_tiles or kernels.MULTIPLY_INT8_TILES is None:
        return KernelChoice(kernels.multiply_int8)
    if is_same(kernels.MULTIPLY_INT8_TILES):
        logger.info("products of int8 codes use AMX tiles for more than 16 rows")
        return KernelChoice(kernels.MULTIPLY_INT8_TILES)
    warn_without_amx(REPLACED, "AMX_INT8")
    return KernelChoice(kernels.multiply_int8, (REPLACED,))


def is_same(kernel: Kernel) -> bool:
    """Return True if small random products have the bits of products without tiles."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(_OUT_FEATURES, _IN_FEATURES, generator=generator)
    x = torch.randn(max(_ROWS), _IN_FEATURES, generator=generator)
    stored = Rounded(TensorInMemory(weight, "random numbers"))
    actual = product.pack(stored, kernel)
    expected = product.pack(stored)
    return all(torch.equal(actual(x[:count]), expected(x[:count])) for count in _ROWS)
