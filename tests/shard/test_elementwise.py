"""The kernels between matrix products give a row the same bits wherever its operands happen to lie."""

from collections.abc import Callable, Iterator
from itertools import permutations

import pytest
import torch
from torch import Tensor

from tgis.shard.compiled import as_bits
from tgis.shard.layers import elementwise

WIDTH = 32  # floats; narrow, so that neighbours lie within what a vector loop takes at once
GAPS = range(0, 66, 2)

Run = Callable[[list[Tensor], Tensor], None]


def _norm(inputs: list[Tensor], out: Tensor) -> None:
    x, delta, weight = inputs
    addresses = (x.data_ptr(), delta.data_ptr(), weight.data_ptr(), out.data_ptr())
    elementwise.rms_norm(1, WIDTH, 1, *addresses, as_bits(1e-6))


def _norm_without_delta(inputs: list[Tensor], out: Tensor) -> None:
    x, _, weight = inputs
    elementwise.rms_norm(1, WIDTH, 1, x.data_ptr(), 0, weight.data_ptr(), out.data_ptr(), as_bits(1e-6))


def _silu(inputs: list[Tensor], out: Tensor) -> None:
    """Its two inputs are the halves of one row."""
    elementwise.silu_multiply(1, WIDTH // 2, 1, inputs[0].data_ptr(), out.data_ptr())


def _split(inputs: list[Tensor], out: Tensor) -> None:
    """Two heads of eight channels for q, one each for k and v."""
    qkv, angles, _ = inputs
    q, k, v = out[:16], out[16:24], out[24:]
    addresses = (qkv.data_ptr(), angles.data_ptr(), q.data_ptr(), k.data_ptr(), v.data_ptr())
    elementwise.split_heads(1, 2, 1, 8, 4, 1, *addresses)


def places() -> Iterator[list[int]]:
    """Where in an arena four operands begin: two of them near each other, the others far away."""
    for one, other in permutations(range(4), 2):
        for gap in GAPS:
            place = [1000, 2000, 3000, 4000]
            place[one], place[other] = 0, WIDTH + gap
            yield place


@pytest.mark.parametrize("run", [_norm, _norm_without_delta, _silu, _split])
def test_bits_do_not_depend_on_where_operands_lie(run: Run) -> None:
    values = torch.randn(20, 3, WIDTH, generator=torch.Generator().manual_seed(0))
    for row in values:
        found = set()
        for place in places():
            arena = torch.zeros(5000)
            *inputs, out = (arena[at : at + WIDTH] for at in place)
            for target, source in zip(inputs, row, strict=True):
                target.copy_(source)
            run(inputs, out)
            found.add(out.numpy().tobytes())
        assert len(found) == 1
