"""Checks shared by tests of several kinds of matrix products."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.support.shard import guarded_memory
from tgis.shard.kernels.cpu.codes import product as code_product
from tgis.shard.kernels.cpu.gemm import panels
from tgis.shard.kernels.cpu.jit.compiler import capture
from tgis.shard.kernels.cpu.kernel_graph import KernelGraph, MemoryPool


def check_replay(product: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """Check that a captured product of x reads the values of x at the time of the replay."""
    expected, pool, source = product(x), MemoryPool(), torch.zeros_like(x)
    with capture(pool.empty) as launches:
        y = product(source)
    graph = KernelGraph(launches)
    source.copy_(x)
    for _ in range(2):
        y.fill_(torch.nan)
        graph.replay()
        assert torch.equal(y, expected)


def check_accesses(
    pack: Callable[[], code_product.CodeProduct], x: Tensor, expected: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check a product of codes in memory whose neighbours must not be accessed."""
    with monkeypatch.context() as patch:
        patch.setattr(code_product, "empty", guarded_memory.empty)
        patch.setattr(panels.arena, "allocate", guarded_memory.allocate)
        assert torch.equal(pack()(guarded_memory.empty(*x.shape).copy_(x)), expected)


def check_rounding(pack: Callable[[Tensor], Callable[[Tensor], Tensor]]) -> None:
    """Check that products round numbers and weights to bfloat16 like torch, including halfway cases and
    infinity."""
    bits = torch.randint(1 << 15, (4000,)) << 16 | torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001]).repeat(800)
    x = bits.to(torch.int32).view(torch.float32)
    x = torch.cat((x, -x, torch.tensor([3.4e38, 1e-38, 0.0])))
    x = x[(x == 0) | (x.abs() >= 2**-126)].unsqueeze(1)  # smaller numbers count as 0
    expected = x.bfloat16().float()
    assert torch.equal(pack(torch.ones(1, 1))(x).nan_to_num(7), expected.nan_to_num(7))
    assert torch.equal(pack(x)(torch.ones(1, 1)).t().nan_to_num(7), expected.nan_to_num(7))


def check_not_finite(product: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """Check that NaN and infinity in rows of x, which has at least eight rows, affect only these rows."""
    expected = product(x)
    x[4, 3], x[5, 0], x[7, -1] = torch.nan, torch.nan, torch.inf
    x[5].view(torch.int32)[0] = 0x7FFFFFFF  # a NaN that a carry would turn into -0
    actual = product(x)
    finite = [i for i in range(len(x)) if i not in (4, 5, 7)]
    assert torch.equal(actual[finite], expected[finite])
    assert not actual[[4, 5, 7]].isfinite().any()
