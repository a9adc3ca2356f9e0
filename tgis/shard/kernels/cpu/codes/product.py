"""Matrix products of float32 rows with codes of 4 or 8 bits that share scales in groups."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from tgis.shard.checkpoint.codes import CodeLayout, Codes
from tgis.shard.checkpoint.tensors import Stored, WeightsError
from tgis.shard.kernels.cpu.codes import kernels
from tgis.shard.kernels.cpu.codes.integer_sums import CAN_ROUND
from tgis.shard.kernels.cpu.codes.layout import (
    COLUMNS,
    HAS_AVX2,
    HAS_TABLES,
    PIECE,
    SCALES,
    UNIT,
    UNIT_BIT,
    Kind,
    find_places,
)
from tgis.shard.kernels.cpu.gemm.launch import check_rows, choose_run
from tgis.shard.kernels.cpu.gemm.panels import arena
from tgis.shard.kernels.cpu.jit.compiler import empty

_ROWS = 1 << 18  # approximate number of codes that are read and packed at a time
_MIN_PARALLEL = 1 << 16  # fewest multiplications for several threads
_FEWEST_COLUMNS = 16  # of a piece: with fewer, scales outweigh the codes
_INTEGERS = (torch.int8, torch.uint8)


@dataclass(frozen=True)
class _Pieces:
    """Cut of a matrix's columns into pieces that share a scale."""

    in_features: int  # with columns that are filled up
    columns: int  # of a piece but the last

    @property
    def count(self) -> int:
        return -(-self.in_features // self.columns)

    @property
    def units(self) -> int:
        return -(-self.columns // UNIT)

    @property
    def last_units(self) -> int:
        return -(-(self.in_features - (self.count - 1) * self.columns) // UNIT)

    def count_panel_bytes(self, bits: int) -> int:
        units = (self.count - 1) * self.units + self.last_units
        return units * UNIT_BIT * bits + self.count * SCALES


@dataclass(frozen=True, eq=False)
class CodeProduct:
    """Product x W^T, float32 [num_tokens, in_features] -> [num_tokens, out_features]. An element's bits do
    not depend on the other rows."""

    kind: Kind
    pieces: _Pieces
    in_features: int
    out_features: int
    panels: Tensor  # uint8, as `layout.py` describes
    zeros: Tensor | None  # int8 [num_panels, num_pieces, COLUMNS]
    table: Tensor  # float32 [16]; with AVX2, the first, second, third and fourth bytes of numbers
    order: Tensor | None  # int32 [pieces.in_features]: columns of x; -1 is a column of zeros

    def __call__(self, x: Tensor) -> Tensor:
        check_rows(x, self.in_features)
        num_rows = len(x)
        y = empty(num_rows, self.out_features)
        if num_rows:
            kernel = kernels.MULTIPLY[self.kind]
            run = choose_run(kernel, num_rows * self.in_features * self.out_features, _MIN_PARALLEL)
            run(
                *(num_rows, self.in_features, torch.get_num_threads(), x.data_ptr(), y.data_ptr()),
                *(self.out_features, self.pieces.in_features, self.pieces.columns, self.pieces.units),
                *(self.panels.data_ptr(), _address(self.zeros), self.table.data_ptr(), _address(self.order)),
            )
        return y


def find_packer(layout: CodeLayout, rounds_activations: bool) -> Callable[[Stored], CodeProduct] | None:
    """Return `pack` if there are products for codes of this layout. They round activations to 8 bits if they
    are to do so and can: not for codes that are indices of a table, nor without the instructions."""
    if layout.rounds_activations or layout.dtype not in _INTEGERS:
        return None
    if layout.dtype == torch.uint8 and not (layout.has_zeros or layout.table):
        return None  # kernels take such codes for numbers around 0, and without zeros they are not
    if layout.table and not HAS_TABLES:
        return None
    is_small = layout.bits <= 4 or (layout.bits == 8 and not layout.table)
    if not (is_small and _find_columns(layout.group)):
        return None
    return partial(pack, rounds_activations=rounds_activations and CAN_ROUND and not layout.table)


def _find_columns(group: int | None) -> int:
    """Return the columns of a piece: the largest part of a group that fits; 0 if it is too small."""
    if group is None:
        return PIECE
    found = next(size for size in range(min(group, PIECE), 0, -1) if group % size == 0)
    return found if found >= _FEWEST_COLUMNS else 0


def pack(weight: Stored, rounds_activations: bool = False) -> CodeProduct:
    """Pack the codes of a weight [out_features, in_features]. Raises WeightsError."""
    out_features, in_features = weight.shape
    layout = weight.layout()
    assert layout is not None
    kind, num_panels = _find_kind(layout, rounds_activations), -(-out_features // COLUMNS)
    order = None
    if layout.is_reordered:
        group_of = weight.codes(slice(0, 0)).group_of
        assert group_of is not None
        order, pieces = _find_order(group_of)
    else:
        pieces = _Pieces(in_features, _find_columns(layout.group))
    centre = 0 if layout.dtype == torch.int8 or layout.table else 1 << (layout.bits - 1)
    panels = arena.allocate(num_panels * pieces.count_panel_bytes(kind.bits))
    zeros = torch.zeros(num_panels, pieces.count, COLUMNS, dtype=torch.int8) if layout.has_zeros else None
    num_rows = max(1, _ROWS // in_features)
    places = torch.tensor(find_places(kind), dtype=torch.int32) if kind.has_halves else None
    for first in range(0, out_features, num_rows):
        codes = weight.codes(slice(first, first + num_rows))
        values, scales, own_zeros = _arrange(codes, kind, pieces, order)
        if zeros is not None and own_zeros is not None:
            _put_zeros(zeros, own_zeros - centre, first, weight.label)
        kernels.pack_codes.parallel(
            *(len(values), first, values.data_ptr(), scales.data_ptr(), panels.data_ptr()),
            *(kind.bits, kind.is_unsigned, _address(places), pieces.units, pieces.last_units, pieces.count),
        )
    zeros = zeros if zeros is not None and zeros.any() else None
    ordered = None if order is None else order.int()
    table = _make_table(layout, kind)
    return CodeProduct(kind, pieces, in_features, out_features, panels, zeros, table, ordered)


def _find_kind(layout: CodeLayout, rounds_activations: bool) -> Kind:
    return Kind(8 if layout.bits == 8 else 4, rounds_activations, HAS_AVX2 and bool(layout.table))


def _find_order(group_of: Tensor) -> tuple[Tensor, _Pieces]:
    """Return columns in the order of their groups, -1 where a group's last piece is filled up, and pieces."""
    counts = group_of.bincount()
    sizes = counts[counts > 0]
    largest = int(sizes.max())
    columns = _find_columns(largest) if bool((sizes == largest).all()) else 0
    columns = columns or min(PIECE // 4, -(-largest // UNIT) * UNIT)
    parts = torch.split(group_of.argsort(stable=True), counts.tolist())
    whole = torch.cat([F.pad(part, (0, -len(part) % columns), value=-1) for part in parts])
    return whole, _Pieces(len(whole), columns)


def _arrange(
    codes: Codes, kind: Kind, pieces: _Pieces, order: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return values in the order of the pieces, uint8 [num_rows, units * UNIT], and scales and zeros,
    [num_rows, num_pieces]. Values are codes as products of the kind have them."""
    layout = codes.layout
    values = codes.values.view(torch.uint8) + _find_offset(layout, kind)
    firsts = torch.arange(0, pieces.in_features, pieces.columns)  # of pieces
    if order is not None:
        assert codes.group_of is not None
        values = F.pad(values, (0, 1)).index_select(1, order % (values.shape[1] + 1))
        groups = codes.group_of[order[firsts]]
    else:
        groups = firsts // (layout.group or max(1, pieces.in_features))
    whole = F.pad(values, (0, pieces.count * pieces.columns - values.shape[1]))
    split = whole.view(len(values), pieces.count, pieces.columns)
    padded = F.pad(split, (0, pieces.units * UNIT - pieces.columns)).flatten(1)
    padded = padded[:, : ((pieces.count - 1) * pieces.units + pieces.last_units) * UNIT].contiguous()
    zeros = None if codes.zeros is None else codes.zeros[:, groups]
    return padded, codes.scales[:, groups].contiguous(), zeros


def _find_offset(layout: CodeLayout, kind: Kind) -> int:
    """Return what codes of a kind of products are more than values of a layout, modulo 256."""
    if layout.table:
        return 0
    centre = 0 if layout.dtype == torch.int8 else 1 << (layout.bits - 1)
    half = 1 << (kind.bits - 1) if kind.is_unsigned else 0
    return (half - centre) % 256


def _put_zeros(zeros: Tensor, found: Tensor, first: int, label: str) -> None:
    """Write zeros of rows from `first` on, [num_rows, num_pieces], to those of panels."""
    if found.numel() and not (found.min() >= -128 and found.max() <= 127):
        raise WeightsError(f"{label} has zero points that are not in the range of its codes")
    rows = torch.arange(first, first + len(found))
    zeros[rows // COLUMNS, :, rows % COLUMNS] = found.to(torch.int8)


def _make_table(layout: CodeLayout, kind: Kind) -> Tensor:
    table = torch.tensor(layout.table or range(-8, 8), dtype=torch.float32)
    return table.view(torch.uint8).view(16, 4).T.contiguous() if kind.has_halves else table


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()
