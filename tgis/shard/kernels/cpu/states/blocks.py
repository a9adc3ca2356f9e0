"""Blocks of neighbouring channels of a head, whose sums are stored together. A scan advances several blocks
together for all tokens of a prompt: as many as the first-level cache holds, and enough of them that the
processor does not wait for one sum before it continues with the next."""

from typing import Any

import numpy as np
from numba import carray

from tgis.shard.kernels.cpu.jit import llvm
from tgis.shard.kernels.cpu.jit.compiler import llvm_function, ordered, pointer
from tgis.shard.kernels.cpu.jit.llvm import I64
from tgis.shard.memory.state_cache import BLOCK

# Blocks that are advanced together. Other processors have too few registers for the sums of four.
MAX_BLOCKS = 4 if llvm.has_feature("avx512f") else 2
_BYTES, _LINE = 4, 64
_F32 = np.float32(0)


@ordered
def count_blocks(rest: int) -> int:
    """Return how many of the `rest` blocks of a head are advanced next: MAX_BLOCKS, 2 or 1."""
    return MAX_BLOCKS if rest >= MAX_BLOCKS else min(rest, 2)


def list_blocks(b: Any, sums: Any, state_size: Any, num_blocks: int) -> list[Any]:
    """Return the addresses of neighbouring blocks, the first of which is at `sums`.

    Rows of these blocks are a multiple of 4 KiB apart if state_size is a multiple of 64. Processors delay a
    load that agrees with an earlier store in the lowest 12 bits of the address. A loop over rows therefore
    loads those of all blocks before it stores any."""
    size = b.mul(state_size, I64(BLOCK * _BYTES))
    return [b.add(sums, b.mul(size, I64(i))) for i in range(num_blocks)]


@llvm_function()
def prefetch_inputs(b: Any, address: Any, num_bytes: Any) -> None:
    """Prefetch a later token's inputs. Processors do not foresee them, because tokens are pages apart."""

    def prefetch(offset: Any, _: list[Any]) -> list[Any]:
        llvm.prefetch_soon(b, address, offset)
        return []

    llvm.loop_range(b, I64(0), num_bytes, _LINE, [], prefetch)


@ordered
def prefetch_token(
    channels: int, first: int, second: int, ahead: int, num_blocks: int, state_size: int
) -> None:
    """Prefetch a token's channels of some blocks and its two projections, `ahead` bytes after addresses."""
    prefetch_inputs(channels + ahead, num_blocks * BLOCK * _BYTES)
    prefetch_inputs(first + ahead, state_size * _BYTES)
    prefetch_inputs(second + ahead, state_size * _BYTES)


@ordered
def find_target(targets: Any, token: int, base: int, slot_size: int, source: int) -> int:
    """Return the address of the sums after a token, given that of the sums before it. `base` is the address
    in the first place; without targets, the sums stay in theirs."""
    return base + targets[token] * slot_size * _BYTES if targets.shape[0] else source


@ordered
def open_sums(source: int, target: int, state_size: int, dim: int) -> Any:
    """Return a head's sums at the address `target`, which become those at `source` if that is another."""
    sums = carray(pointer(target, _F32), (state_size, dim))
    if source != target:
        before = carray(pointer(source, _F32), (state_size, dim))
        for n in range(state_size):
            for p in range(dim):
                sums[n, p] = before[n, p]
    return sums
