"""Triton's interpreter computes the same as a GPU."""

import sys

import torch

from tests.support.cuda.interpreter import interpreted_modules
from tests.support.cuda.toy_kernels import count, interpreted, multiply
from tgis.shard.kernels.cuda.implementations import KERNELS


def test_products_of_bfloat16_are_right() -> None:
    interpreted_modules()
    generator = torch.Generator().manual_seed(1)
    a = torch.randn(16, 64, generator=generator).bfloat16()
    b = torch.randn(64, 32, generator=generator).bfloat16()
    c = torch.full((16, 32), torch.nan)
    interpreted(multiply)[1,](a, b, c, 16, 32, 64)
    torch.testing.assert_close(c, (a.double() @ b.double()).float(), rtol=1e-5, atol=1e-5)


def test_a_loop_ends_where_memory_says() -> None:
    interpreted_modules()
    total = torch.full((1,), -1, dtype=torch.int32)
    interpreted(count)[1,](torch.tensor([5], dtype=torch.int32), total)
    assert total.tolist() == [10]


def test_the_package_keeps_its_modules() -> None:
    copies = interpreted_modules()
    for name, module in KERNELS.items():
        assert sys.modules[module.__name__] is module
        assert getattr(sys.modules[module.__name__.rpartition(".")[0]], name) is module
        assert copies[name] is not module
        assert copies[name].launch is not module.launch
