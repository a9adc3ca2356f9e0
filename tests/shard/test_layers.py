"""Layers on their own: against torch in double precision, bit for bit in any company, and cut over ranks."""

import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tgis.shard.layers import cpu
from tgis.shard.layers.embedding import Embedding, Head
from tgis.shard.layers.kernels import Parts, Product
from tgis.shard.layers.linear import ColumnParallel, RowParallel
from tgis.shard.weights import Weights
from tgis.shard.world import World

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
COUNTS = [*range(1, 40), 61, 62, 120, 121, 122, 127, 134, 241]


def pack(weight: Tensor, dtype: torch.dtype) -> Product:
    return cpu.pack(weight, dtype, "a weight")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("in_features", "out_features"), [(64, 99), (33, 7), (1500, 40)])
def test_products(dtype: torch.dtype, in_features: int, out_features: int) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(out_features, in_features), torch.randn(241, in_features)
    product = pack(weight, dtype)
    whole = product(x)
    expected = x.double() @ weight.to(dtype).double().t()
    torch.testing.assert_close(whole.double(), expected, rtol=1e-5, atol=1e-4)
    for count in COUNTS:
        assert torch.equal(product(x[:count]), whole[:count]), f"{count} rows"
        assert torch.equal(product(x[-count:]), whole[-count:]), f"{count} rows"
    assert product(x[:0]).shape == (0, out_features)


def test_a_weight_beyond_float16_is_kept_exact(caplog: pytest.LogCaptureFixture) -> None:
    weight = torch.tensor([[1.0, 2.0], [70000.0, 3.0]])
    with caplog.at_level(logging.WARNING):
        product = cpu.pack(weight, torch.float16, "file: tensor x")
    assert caplog.messages == ["file: tensor x does not fit float16 and is kept as float32"]
    assert torch.equal(product(torch.eye(2)), weight.t())


def test_a_packed_weight_is_a_copy() -> None:
    for dtype in DTYPES:
        weight = torch.randn(8, 8)
        product, expected = pack(weight, dtype), weight.to(dtype).float().clone()
        weight.zero_()
        torch.testing.assert_close(product(torch.eye(8)).t(), expected)


def parts(directory: Path, world: World, dtype: torch.dtype = torch.float32) -> Parts:
    return Parts(world, Weights(directory, {"layer": "layer"}), dtype, cpu)


def test_columns_are_cut_piece_by_piece(tmp_path: Path) -> None:
    """Widths 8, 4, 4 over four ranks, the last two in two pieces that neighbours share."""
    content = {"layer.weight": torch.randn(16, 6), "layer.bias": torch.randn(16)}
    save_file(content, tmp_path / "model.safetensors")
    x = torch.randn(5, 6)
    full = torch.nn.functional.linear(x, content["layer.weight"], content["layer.bias"])
    q, k, v = full.split([8, 4, 4], -1)
    for rank in range(4):
        layer = ColumnParallel(parts(tmp_path, World(rank, 4)), "layer", 6, [8, 4, 4], True, [4, 2, 2])
        expected = [q.chunk(4, -1)[rank], k.chunk(2, -1)[rank // 2], v.chunk(2, -1)[rank // 2]]
        torch.testing.assert_close(layer(x), torch.cat(expected, -1))


class Summed(World):
    """A rank that is told what the others' parts sum to."""

    others = torch.tensor(0.0)

    def all_reduce(self, x: Tensor) -> Tensor:
        return x.add_(self.others)


def test_rows_are_cut_and_summed(tmp_path: Path) -> None:
    content = {"layer.weight": torch.randn(5, 12), "layer.bias": torch.randn(5)}
    save_file(content, tmp_path / "model.safetensors")
    x = torch.randn(4, 12)
    Summed.others = x[:, 4:] @ content["layer.weight"][:, 4:].t()
    layer = RowParallel(parts(tmp_path, Summed(0, 3)), "layer", 12, 5, True)
    full = torch.nn.functional.linear(x, content["layer.weight"], content["layer.bias"])
    torch.testing.assert_close(layer(x[:, :4].contiguous()), full)


@pytest.mark.parametrize("dtype", DTYPES)
def test_both_ends_of_the_vocabulary(dtype: torch.dtype, tmp_path: Path) -> None:
    table = torch.randn(11, 6)
    save_file({"layer.weight": table}, tmp_path / "model.safetensors")
    single = parts(tmp_path, World(0, 1), dtype)
    ids, rounded = torch.tensor([10, 0, 3, 3]), table.to(dtype).float()
    x = Embedding(single, "layer", 11, 6)(ids)
    assert x.dtype == torch.float32
    assert torch.equal(x, rounded[ids])
    x.zero_()
    assert torch.equal(Embedding(single, "layer", 11, 6)(ids), rounded[ids]), "a result is the table itself"
    torch.testing.assert_close(Head(single, "layer", 11, 6)(table), table @ rounded.t(), rtol=1e-5, atol=1e-5)
