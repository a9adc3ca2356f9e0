"""Check the values of quantized weights one at a time, and that slices of views return the right codes."""

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tgis.shard.checkpoint.codes import CodeLayout, Codes
from tgis.shard.checkpoint.tensors import ALL, Sliced, StackedRows

ROWS, COLUMNS = 5, 12
TABLE = (-1.0, -0.5, 0.25, 3.0)
LAYOUTS = {
    "groups": CodeLayout(torch.int8, 8, 4),
    "a ragged last group": CodeLayout(torch.int8, 8, 5),
    "whole rows": CodeLayout(torch.int8, 8, None),
    "zeros": CodeLayout(torch.uint8, 4, 6, has_zeros=True),
    "reordered": CodeLayout(torch.uint8, 4, None, has_zeros=True, is_reordered=True),
    "a table": CodeLayout(torch.uint8, 2, 3, table=TABLE),
    "floats of 8 bits": CodeLayout(torch.float8_e4m3fn, 8, 4),
}


def draw(layout: CodeLayout, rows: int = ROWS) -> Codes:
    num_groups = 3 if layout.is_reordered else -(-COLUMNS // (layout.group or COLUMNS))
    values = torch.randint(0, 1 << min(layout.bits, 6), (rows, COLUMNS)).to(layout.dtype)
    zeros = torch.randint(0, 16, (rows, num_groups)).float() if layout.has_zeros else None
    group_of = torch.randint(0, 3, (COLUMNS,)) if layout.is_reordered else None
    return Codes(layout, values, torch.rand(rows, num_groups), zeros, group_of)


def expected(codes: Codes) -> Tensor:
    """Return the dequantized weights by the definition."""
    layout, out = codes.layout, torch.empty(codes.values.shape)
    for n, k in torch.cartesian_prod(*(torch.arange(size) for size in out.shape)).tolist():
        g = k // (layout.group or COLUMNS) if codes.group_of is None else int(codes.group_of[k])
        value = float(codes.values[n, k])
        value = layout.table[int(value)] if layout.table else value
        zero = 0.0 if codes.zeros is None else float(codes.zeros[n, g])
        out[n, k] = (value - zero) * float(codes.scales[n, g])
    return out


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_weight_is_a_scaled_difference(name: str) -> None:
    codes = draw(LAYOUTS[name])
    torch.testing.assert_close(codes.dequantize(), expected(codes), rtol=1e-6, atol=0)


class CodesInMemory:
    label = "memory: tensor x"

    def __init__(self, codes: Codes):
        self._codes, self.shape = codes, tuple(codes.values.shape)

    def read(self, rows: slice = ALL, columns: slice = ALL) -> Tensor:
        return self._codes.dequantize()[rows, columns]

    def layout(self, columns: slice = ALL) -> CodeLayout | None:
        return self._codes.layout if columns.indices(COLUMNS) == (0, COLUMNS, 1) else None

    def codes(self, rows: slice = ALL, columns: slice = ALL) -> Codes:
        assert self.layout(columns)
        whole = self._codes
        zeros = None if whole.zeros is None else whole.zeros[rows]
        return Codes(whole.layout, whole.values[rows], whole.scales[rows], zeros, whole.group_of)


def stack(layouts: Sequence[str]) -> StackedRows:
    return StackedRows([CodesInMemory(draw(LAYOUTS[name], 3 + i)) for i, name in enumerate(layouts)], "stack")


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "reordered"])
def test_views_give_codes_of_the_numbers_that_they_give(name: str) -> None:
    rng, stored = random.Random(0), stack([name] * 3)
    for _ in range(40):
        outer, inner = (sorted(rng.randint(0, 12) for _ in range(2)) for _ in range(2))
        part = Sliced(stored, slice(*outer))
        assert part.layout() == LAYOUTS[name]
        result = part.codes(slice(*inner))
        assert torch.equal(result.dequantize(), stored.read()[slice(*outer)][slice(*inner)])
    assert Sliced(stored, ALL, slice(0, 8)).layout() is None, "the tensor cannot cut columns"


def test_parts_without_a_common_layout_are_read_as_floats() -> None:
    """Check that parts without a common layout are read as floats.

    Reordered parts each have their own order."""
    assert stack(["groups", "zeros"]).layout() is None
    assert stack(["reordered", "reordered"]).layout() is None
    alone = CodesInMemory(draw(LAYOUTS["reordered"]))
    assert Sliced(alone, slice(1, 3)).layout() == LAYOUTS["reordered"]
    assert torch.equal(Sliced(alone, slice(1, 3)).codes().dequantize(), alone.read()[1:3])


def test_parts_of_one_order_are_joined() -> None:
    codes = [draw(LAYOUTS["reordered"], rows) for rows in (3, 4)]
    orders = codes[0].group_of, codes[1].group_of
    assert orders[0] is not None
    assert orders[1] is not None
    assert not torch.equal(*orders)
    parts = [Codes(one.layout, one.values, one.scales, one.zeros, orders[0]) for one in codes]
    stored = StackedRows([CodesInMemory(part) for part in parts], "stack")
    assert stored.layout() == LAYOUTS["reordered"]
    assert torch.equal(stored.codes(slice(1, 6)).dequantize(), stored.read(slice(1, 6)))
    assert StackedRows([CodesInMemory(one) for one in codes], "stack").layout() is None
