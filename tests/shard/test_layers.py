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
from tgis.shard.layers.rotary import LinearScaling, Rope, Rotary
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


@pytest.mark.parametrize("size", [1, 31, 576])
def test_rms_norm(size: int) -> None:
    torch.manual_seed(0)
    x, delta, weight = torch.randn(300, size) * 10, torch.randn(300, size), torch.randn(size)
    total = x + delta
    expected = torch.nn.functional.rms_norm(total.double(), (size,), weight.double(), 1e-5)
    changed = x.clone()
    normed = cpu.rms_norm(changed, delta, weight, 1e-5)
    torch.testing.assert_close(normed.double(), expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(changed, total)
    assert torch.equal(cpu.rms_norm(total.clone(), None, weight, 1e-5), normed)
    for i in (0, 7, 299):
        assert torch.equal(
            cpu.rms_norm(x[i : i + 1].clone(), delta[i : i + 1], weight, 1e-5), normed[i : i + 1]
        )


def test_silu_multiply() -> None:
    torch.manual_seed(0)
    x = torch.randn(300, 2 * 77) * 20
    x[5, :4] = torch.tensor([1000.0, -1000.0, 88.5, -88.5])
    result = cpu.silu_multiply(x)
    expected = torch.nn.functional.silu(x[:, :77].double()) * x[:, 77:].double()
    torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-6)
    for i in (0, 5, 299):
        assert torch.equal(cpu.silu_multiply(x[i : i + 1]), result[i : i + 1])
    assert cpu.silu_multiply(torch.full((1, 2), torch.nan)).isnan().all()


@pytest.mark.parametrize("turned", [8, 6, 0])
def test_split_heads(turned: int) -> None:
    """The first channels are turned, and the queries' scores then depend on distance alone."""
    torch.manual_seed(0)
    num_tokens, heads, kv_heads, dim = 300, 3, 1, 8
    qkv = torch.randn(num_tokens, (heads + 2 * kv_heads) * dim)
    rotary = Rotary(Rope(turned, 100.0, LinearScaling(2.0), amplitude=1.5), cpu) if turned else None
    positions = torch.arange(num_tokens) + 5
    angles = rotary(positions) if rotary else torch.empty(2, num_tokens, 0)
    q, k, v = cpu.split_heads(qkv, heads, kv_heads, angles)
    heads_of = qkv.view(num_tokens, -1, dim)
    assert torch.equal(v, heads_of[:, -1:])
    assert torch.equal(q[..., turned:], heads_of[:, :heads, turned:])
    frequency = 100.0 ** (-torch.arange(0, turned, 2).double() / max(turned, 1)) / 2.0
    turn = 1.5 * torch.exp(1j * positions[:, None, None] * frequency)
    for ours, given in ((q, heads_of[:, :heads]), (k, heads_of[:, heads : heads + kv_heads])):
        real, imaginary = given[..., :turned].double().chunk(2, -1)
        expected = torch.complex(real, imaginary) * turn
        torch.testing.assert_close(
            ours[..., :turned].double(), torch.cat((expected.real, expected.imag), -1), rtol=1e-4, atol=1e-4
        )


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
