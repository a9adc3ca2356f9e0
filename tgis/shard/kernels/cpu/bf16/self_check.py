"""Chooses what computes products with bfloat16 arithmetic, when a shard starts: the processor's instruction
if it gives the bits of plain arithmetic."""

import logging
from typing import NamedTuple

import torch
from torch import Tensor

from tgis.shard.checkpoint.tensors import TensorInMemory
from tgis.shard.kernels.cpu.bf16 import kernels
from tgis.shard.kernels.cpu.bf16.product import Packer, pack_rounded, pairs_packer

logger = logging.getLogger(__name__)

REPLACED = "multiply_pairs"  # name of the kernel that may be replaced
_ROWS, _IN_FEATURES, _OUT_FEATURES = (1, 14, 50), 71, 40  # rows of products that are checked


class PackerChoice(NamedTuple):
    pack: Packer
    replaced: tuple[str, ...] = ()
    """Names of kernels that give wrong products here."""


def choose_packer() -> PackerChoice:
    """Return the fastest way to pack weights that gives the right products here."""
    if kernels.MULTIPLY_PAIRS is None:
        logger.warning(
            "the processor has no AVX512_BF16: bfloat16 arithmetic is emulated, and slower than float32"
        )
        return PackerChoice(pack_rounded)
    pack = pairs_packer(kernels.MULTIPLY_PAIRS)
    if not is_exact(pack):
        logger.warning(
            "CPU kernel %s is replaced by rounding and float32 arithmetic, which is slower: this processor's "
            "AVX512_BF16 computes something else",
            REPLACED,
        )
        return PackerChoice(pack_rounded, (REPLACED,))
    return PackerChoice(pack)


def is_exact(pack: Packer) -> bool:
    """Return True if small random products have the bits of plain arithmetic."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(_OUT_FEATURES, _IN_FEATURES, generator=generator)
    x = torch.randn(max(_ROWS), _IN_FEATURES, generator=generator)
    product, expected = pack(TensorInMemory(weight, "random numbers")), multiply_plainly(x, weight)
    return all(torch.equal(product(x[:count]), expected[:count]) for count in _ROWS)


def multiply_plainly(x: Tensor, weight: Tensor) -> Tensor:
    """Return the product of numbers rounded to bfloat16, added one after the other in float32.

    A sum is rounded to float64 first, which changes no float32 but by the rarest chance."""
    x, weight = x.bfloat16().double(), weight.bfloat16().double()
    total = torch.zeros(len(x), len(weight))
    for column, factors in zip(x.T, weight.T, strict=True):
        total = (total + column.outer(factors)).float()
    return total
