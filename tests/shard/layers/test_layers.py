"""Single layers, against torch and split over ranks."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.support.shard.layer_parts import parts
from tgis.shard.collectives import ProcessGroup
from tgis.shard.layers.embedding import Embedding, LMHead
from tgis.shard.layers.linear import ColumnParallel, Replicated, RowParallel
from tgis.shard.layers.lora import Adapter, AdapterSet, Cut, LowRank, TokenAdapters

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def test_columns_are_cut_piece_by_piece(tmp_path: Path) -> None:
    """Widths 8, 4, 4 on four ranks. The last two have two pieces, which neighbours share."""
    content = {"layer.weight": torch.randn(16, 6), "layer.bias": torch.randn(16)}
    save_file(content, tmp_path / "model.safetensors")
    x = torch.randn(5, 6)
    full = torch.nn.functional.linear(x, content["layer.weight"], content["layer.bias"])
    q, k, v = full.split([8, 4, 4], -1)
    for rank in range(4):
        layer = ColumnParallel(parts(tmp_path, ProcessGroup(rank, 4)), "layer", 6, [8, 4, 4], True, [4, 2, 2])
        expected = [q.chunk(4, -1)[rank], k.chunk(2, -1)[rank // 2], v.chunk(2, -1)[rank // 2]]
        torch.testing.assert_close(layer(x, None), torch.cat(expected, -1))


class Summed(ProcessGroup):
    """Rank whose all_reduce adds given summands of the other ranks."""

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
    torch.testing.assert_close(layer(x[:, :4].contiguous(), None), full)


@pytest.mark.parametrize("dtype", DTYPES)
def test_both_ends_of_the_vocabulary(dtype: torch.dtype, tmp_path: Path) -> None:
    table = torch.randn(11, 6)
    save_file({"layer.weight": table}, tmp_path / "model.safetensors")
    single = parts(tmp_path, ProcessGroup(0, 1), dtype)
    ids, rounded = torch.tensor([10, 0, 3, 3]), table.to(dtype).float()
    x = Embedding(single, "layer", 11, 6)(ids, None)
    assert x.dtype == torch.float32
    assert torch.equal(x, rounded[ids])
    x.zero_()
    assert torch.equal(Embedding(single, "layer", 11, 6)(ids, None), rounded[ids]), "the result is a copy"
    torch.testing.assert_close(
        LMHead(single, "layer", 11, 6)(table, None), table @ rounded.t(), rtol=1e-5, atol=1e-5
    )


def tune(in_features: int, first: int, width: int) -> tuple[TokenAdapters, Tensor]:
    """Return the adapters of three tokens, of which the second has none, and the update of the others as a
    matrix."""
    a, b = torch.randn(in_features, 2), torch.randn(2, width)
    adapters = AdapterSet([Adapter({"layer": (LowRank(a, b, first),)})])
    return TokenAdapters(adapters, torch.tensor([0, -1, 0], dtype=torch.int32)), a @ b


def test_adapters_are_added_before_the_sum_over_ranks(tmp_path: Path) -> None:
    """They are added to a rank's part of the product. The bias is added once."""
    content = {"layer.weight": torch.randn(8, 8), "layer.bias": torch.randn(8)}
    save_file(content, tmp_path / "model.safetensors")
    weight, bias, x = content["layer.weight"], content["layer.bias"], torch.randn(3, 8)
    Summed.others = torch.randn(3, 8)
    tuned, delta = tune(8, 2, 2)
    expected = x @ weight[4:].t() + bias[4:]
    expected[[0, 2], 2:] += (x @ delta)[[0, 2]]
    layer = ColumnParallel(parts(tmp_path, ProcessGroup(1, 2)), "layer", 8, [8], True)
    torch.testing.assert_close(layer(x, tuned), expected, rtol=1e-5, atol=1e-5)
    expected = x @ weight.t()
    expected[[0, 2], 2:4] += (x @ delta)[[0, 2]]
    layer = Replicated(parts(tmp_path, ProcessGroup(1, 2)), "layer", 8, 8)
    torch.testing.assert_close(layer(x, tuned), expected, rtol=1e-5, atol=1e-5)
    tuned, delta = tune(4, 0, 8)
    own = x[:, 4:].contiguous()
    expected = own @ weight[:, 4:].t() + bias + Summed.others
    expected[[0, 2]] += (own @ delta)[[0, 2]]
    layer = RowParallel(parts(tmp_path, Summed(1, 2)), "layer", 8, 8, True)
    torch.testing.assert_close(layer(own, tuned), expected, rtol=1e-5, atol=1e-5)


def test_adapters_at_both_ends_of_the_vocabulary(tmp_path: Path) -> None:
    table = torch.randn(11, 6)
    save_file({"layer.weight": table}, tmp_path / "model.safetensors")
    single = parts(tmp_path, ProcessGroup(0, 1))
    ids = torch.tensor([10, 3, 0])
    tuned, delta = tune(11, 0, 6)
    expected = table[ids]
    expected[[0, 2]] += delta[ids[[0, 2]]]
    torch.testing.assert_close(Embedding(single, "layer", 11, 6)(ids, tuned), expected)
    tuned, delta = tune(6, 1, 10)
    x = torch.randn(3, 6)
    expected = x @ table.t()
    expected[[0, 2], 1:] += (x @ delta)[[0, 2]]
    actual = LMHead(single, "layer", 11, 6)(x, tuned)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_parts_of_matrices_by_rank(tmp_path: Path) -> None:
    save_file({"layer.weight": torch.randn(16, 6)}, tmp_path / "model.safetensors")
    given = parts(tmp_path, ProcessGroup(1, 2))

    def cut() -> Cut:
        return given.cuts.pop("layer")

    ColumnParallel(given, "layer", 6, [8, 8], False)
    assert cut() == Cut((16, 6), (slice(4, 8), slice(12, 16)))
    RowParallel(given, "layer", 6, 16, False)
    assert cut() == Cut((16, 6), (slice(0, 16),), slice(3, 6))
    Replicated(given, "layer", 6, 16)
    assert cut() == Cut((16, 6), (slice(0, 16),))
    Embedding(given, "layer", 16, 6)
    assert cut() == Cut((16, 6), (slice(0, 16),), is_table=True)
    LMHead(given, "layer", 16, 6)
    assert cut() == Cut((16, 6), (slice(8, 16),))
