"""Matrix products of float32 rows with codes of 2 to 8 bits that share scales in groups."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tgis.shard.checkpoint.codes import CodeLayout, Codes
from tgis.shard.checkpoint.tensors import Stored, WeightsError
from tgis.shard.kernels.cpu.codes import kernels
from tgis.shard.kernels.cpu.codes.integer_sums import CAN_ROUND
from tgis.shard.kernels.cpu.codes.layout import (
    COLUMNS,
    HAS_TABLES,
    LOOKS_UP_BYTES,
    PACKED_BITS,
    PIECE,
    UNIT,
    UNIT_BIT,
    Kind,
    ScaleForm,
    find_places,
)
from tgis.shard.kernels.cpu.codes.look_up import look_up
from tgis.shard.kernels.cpu.codes.packing import pack_codes
from tgis.shard.kernels.cpu.codes.tile_kernels import CodeTileKernels
from tgis.shard.kernels.cpu.gemm.launch import check_rows, choose_run
from tgis.shard.kernels.cpu.gemm.panels import arena
from tgis.shard.kernels.cpu.jit.compiler import Kernel, empty

_ROWS = 1 << 20  # approximate number of codes read and packed at a time
_MIN_PARALLEL = 1 << 16  # minimum multiplications for several threads
_MIN_LOOKED_UP = 1 << 13  # minimum looked-up numbers for several threads
_MIN_SHARED_ROWS = 64  # minimum rows that are rounded once for all threads
_MIN_COLUMNS = 16  # minimum columns of a piece; with fewer, scales need more memory than codes
_INTEGERS = (torch.int8, torch.uint8)
NO_KERNELS: Mapping[Kind, CodeTileKernels] = MappingProxyType({})


@dataclass(frozen=True)
class _Pieces:
    """Split of a matrix's columns into pieces that share a scale."""

    in_features: int  # including padding
    columns: int  # columns per piece, except the last

    @property
    def count(self) -> int:
        return -(-self.in_features // self.columns)

    @property
    def units(self) -> int:
        return -(-self.columns // UNIT)

    @property
    def last_units(self) -> int:
        return -(-(self.in_features - (self.count - 1) * self.columns) // UNIT)

    def count_panel_bytes(self, bits: int, scale_bytes: int) -> int:
        units = (self.count - 1) * self.units + self.last_units
        return units * UNIT_BIT * bits + self.count * scale_bytes


class _Scales(NamedTuple):
    """Form of a matrix's scales and offsets."""

    form: ScaleForm
    has_offsets: bool
    pieces_per_factor: int
    first_piece: int  # index of the first piece among the pieces that share its factors

    @property
    def piece_bytes(self) -> int:
        return self.form.count_bytes(self.has_offsets) * COLUMNS


@dataclass(frozen=True, eq=False)
class CodeProduct:
    """Product x W^T, float32 [num_tokens, in_features] -> [num_tokens, out_features]. An element's bits do
    not depend on other rows."""

    kind: Kind
    pieces: _Pieces
    in_features: int
    out_features: int
    panels: Tensor  # uint8, as `layout.py` describes
    zeros: Tensor | None  # int8 [num_panels, num_pieces, COLUMNS]
    table: Tensor  # float32 [16]; with AVX2 or NEON, uint8 [4, 16], the bytes of the numbers
    order: Tensor | None  # int32 [pieces.in_features]: columns of x; -1 means zeros
    scales: _Scales
    factors: Tensor | None  # float32 [num_panels, num_factors, 1 or 2, COLUMNS]
    centre: int  # half the range of codes if there are offsets, otherwise 0
    numbers: Tensor  # float32 [2^bits], values of the codes
    places: Tensor | None  # int32 [COLUMNS], offsets of columns in a unit if bytes hold two codes
    kernel: Kernel  # for rows that `tiles` does not multiply
    tiles: CodeTileKernels | None

    def __call__(self, x: Tensor) -> Tensor:
        y = empty(len(x), self.out_features)
        self.multiply(x, y, 0, self.round(x))
        return y

    def multiply(self, x: Tensor, y: Tensor, first: int, rounded: Tensor | None) -> None:
        """Write the product to columns of y, [num_tokens, any], beginning with column `first`. `rounded` is
        the result of `round`."""
        check_rows(x, self.in_features)
        num_rows, pitch = y.shape
        if num_rows:
            tiles = self.tiles if self.tiles and num_rows >= self.tiles.min_rows else None
            kernel = self.kernel if tiles is None else tiles.multiply
            run = choose_run(kernel, num_rows * self.in_features * self.out_features, _MIN_PARALLEL)
            addresses = (x.data_ptr(), y.data_ptr() + 4 * first)
            size = (num_rows, self.in_features, torch.get_num_threads())
            run(*size, *addresses, pitch, *self._describe(), _address(rounded))

    def round(self, x: Tensor) -> Tensor | None:
        """Return the rows as the kernel reads them, or None if its threads round them."""
        if self.tiles is None or len(x) < _MIN_SHARED_ROWS:
            return None
        check_rows(x, self.in_features)
        num_bytes = self.tiles.count_rounded_bytes(len(x), self.pieces.count, self.pieces.units)
        rounded = empty(num_bytes // 4)
        addresses = (x.data_ptr(), rounded.data_ptr())
        self.tiles.round_rows.parallel(len(x), self.in_features, *addresses, *self._describe())
        return rounded

    def rounds_like(self, other: "CodeProduct") -> bool:
        """Return True if `round` returns the same as that of another product."""
        if self.tiles is None or other.tiles is None or self.pieces != other.pieces:
            return False
        if self.tiles.round_rows is not other.tiles.round_rows or not self.order is other.order is None:
            return False
        # Sums of values of 8 bits are multiplied by their scales if there are offsets.
        return self.tiles.value_bytes > 1 or self.scales.has_offsets == other.scales.has_offsets

    @property
    def width(self) -> int:
        return self.in_features

    @property
    def num_rows(self) -> int:
        return self.out_features

    def look_up(self, ids: Tensor) -> Tensor:
        """Return rows of the matrix, float32 [num_ids, in_features]."""
        out = empty(len(ids), self.in_features)
        run = choose_run(look_up, len(ids) * self.in_features, _MIN_LOOKED_UP)
        addresses = (ids.data_ptr(), out.data_ptr())
        form = (self.kind.bits, self.kind.is_unsigned, _address(self.places), self.numbers.data_ptr())
        run(len(ids), *addresses, *form, *self._describe())
        return out

    def _describe(self) -> tuple[int, ...]:
        """Return the arguments that describe the matrix to kernels."""
        scales = self.scales
        return (
            *(self.out_features, self.pieces.in_features, self.pieces.columns, self.pieces.units),
            *(scales.form, scales.piece_bytes, self.centre, scales.has_offsets),
            *(scales.pieces_per_factor, scales.first_piece),
            *(self.panels.data_ptr(), _address(self.factors), _address(self.zeros)),
            *(self.table.data_ptr(), _address(self.order)),
        )


class JoinedProduct:
    """Product with the concatenated rows of several matrices. Adjacent matrices share rounded rows of x if
    they read them in the same form."""

    def __init__(self, products: Sequence[CodeProduct]):
        ends = [*accumulate(product.out_features for product in products)]
        rounds = [True, *(not each.rounds_like(before) for before, each in pairwise(products))]
        self._parts = list(zip(products, [0, *ends[:-1]], rounds, strict=True))
        self._out_features = ends[-1]

    def __call__(self, x: Tensor) -> Tensor:
        y = empty(len(x), self._out_features)
        rounded = None
        for product, first, rounds in self._parts:
            if rounds:
                rounded = product.round(x)
            product.multiply(x, y, first, rounded)
        return y


def find_packer(
    layout: CodeLayout, rounds_activations: bool, tile_kernels: Mapping[Kind, CodeTileKernels] = NO_KERNELS
) -> Callable[[Stored], CodeProduct] | None:
    """Return `pack` if products support this layout. With `rounds_activations`, they round activations to 8
    bits, except for indices of a table and on processors without the instructions."""
    if layout.rounds_activations or layout.dtype not in _INTEGERS:
        return None
    if layout.dtype == torch.uint8 and not (layout.has_zeros or layout.table or layout.has_offsets):
        return None  # kernels would read these codes as signed numbers
    if layout.table and not HAS_TABLES:
        return None
    is_packed = _is_packed(layout)
    is_small = is_packed or layout.bits <= 4 or (layout.bits == 8 and not layout.table)
    if not (is_small and _find_columns(layout.group)):
        return None
    rounds = rounds_activations and CAN_ROUND and not layout.table
    return partial(pack, rounds_activations=rounds, tile_kernels=tile_kernels)


def find_table_packer(
    layout: CodeLayout, rounds_activations: bool, tile_kernels: Mapping[Kind, CodeTileKernels] = NO_KERNELS
) -> Callable[[Stored], CodeProduct] | None:
    """Return `pack` if rows of the packed matrix can be looked up."""
    if layout.has_zeros or layout.is_reordered:
        return None
    return find_packer(layout, rounds_activations, tile_kernels)


def _is_packed(layout: CodeLayout) -> bool:
    return layout.bits in PACKED_BITS and layout.scale_type != "float32"


def _find_columns(group: int | None) -> int:
    """Return the columns of a piece: the largest divisor of a group that fits, or 0 if it is too small."""
    if group is None:
        return PIECE
    columns = next(size for size in range(min(group, PIECE), 0, -1) if group % size == 0)
    return columns if columns >= _MIN_COLUMNS else 0


def pack(
    weight: Stored,
    rounds_activations: bool = False,
    tile_kernels: Mapping[Kind, CodeTileKernels] = NO_KERNELS,
) -> CodeProduct:
    """Pack the codes of a weight [out_features, in_features]. `tile_kernels` are those on AMX
    tiles that products use, by their kind. Raises WeightsError."""
    out_features, in_features = weight.shape
    layout = weight.layout()
    assert layout is not None
    kind = _find_kind(layout, rounds_activations)
    num_panels = -(-out_features // COLUMNS)
    order = None
    if layout.is_reordered:
        group_of = weight.codes(slice(0, 0)).group_of
        assert group_of is not None
        order, pieces = _find_order(group_of)
    else:
        pieces = _Pieces(in_features, _find_columns(layout.group))
    scales = _describe_scales(layout, pieces)
    panels = arena.allocate(num_panels * pieces.count_panel_bytes(kind.bits, scales.piece_bytes))
    zeros = torch.zeros(num_panels, pieces.count, COLUMNS, dtype=torch.int8) if layout.has_zeros else None
    factors = _allocate_factors(scales, pieces, num_panels)
    places = torch.tensor(find_places(kind), dtype=torch.int32) if kind.has_halves else None
    packing = _Packing(kind, pieces, order, scales, panels, zeros, factors, places)
    num_rows = max(1, _ROWS // in_features)
    for first in range(0, out_features, num_rows):
        packing.add(weight.codes(slice(first, first + num_rows)), first, weight.label)
    on_tiles = _find_tile_kernels(layout, kind, tile_kernels)
    return CodeProduct(
        kind,
        pieces,
        in_features,
        out_features,
        panels,
        zeros if zeros is not None and zeros.any() else None,
        _make_table(layout, kind),
        None if order is None else order.int(),
        scales,
        factors,
        1 << (layout.bits - 1) if layout.has_offsets and layout.dtype == torch.uint8 else 0,
        _list_numbers(layout, kind),
        places,
        kernels.MULTIPLY[kind],
        on_tiles,
    )


class _Packing(NamedTuple):
    """Matrix that is packed a few rows at a time."""

    kind: Kind
    pieces: _Pieces
    order: Tensor | None
    scales: _Scales
    panels: Tensor
    zeros: Tensor | None
    factors: Tensor | None
    places: Tensor | None

    def add(self, codes: Codes, first: int, label: str) -> None:
        """Pack rows, beginning with row `first`. Raises WeightsError."""
        kind, pieces, layout = self.kind, self.pieces, codes.layout
        values, groups = _arrange(codes, kind, pieces, self.order)
        if self.zeros is not None and codes.zeros is not None:
            centre = 0 if layout.dtype == torch.int8 or layout.table else 1 << (layout.bits - 1)
            _put_zeros(self.zeros, codes.zeros[:, groups] - centre, first, label)
        if self.factors is not None and codes.factors is not None:
            rows = torch.arange(first, first + len(values))
            self.factors[rows // COLUMNS, :, :, rows % COLUMNS] = codes.factors
        stored = _store_scales(codes, groups, self.scales)
        pack_codes.parallel(
            len(values),
            first,
            values.data_ptr(),
            stored.data_ptr(),
            self.panels.data_ptr(),
            kind.bits,
            kind.is_unsigned,
            _address(self.places),
            pieces.units,
            pieces.last_units,
            pieces.count,
            *stored.shape[2:],
        )


def _describe_scales(layout: CodeLayout, pieces: _Pieces) -> _Scales:
    form = ScaleForm[layout.scale_type]
    first = 0
    pieces_per_factor = pieces.count
    if layout.groups_per_factor is not None and layout.group is not None:
        pieces_per_group = layout.group // pieces.columns
        pieces_per_factor = layout.groups_per_factor * pieces_per_group
        first = layout.first_group * pieces_per_group
    return _Scales(form, layout.has_offsets, pieces_per_factor, first)


def _allocate_factors(scales: _Scales, pieces: _Pieces, num_panels: int) -> Tensor | None:
    if scales.form not in (ScaleForm.int8, ScaleForm.uint4):
        return None
    count = -(-(pieces.count + scales.first_piece) // scales.pieces_per_factor)
    return torch.zeros(num_panels, count, 1 + scales.has_offsets, COLUMNS)


def _store_scales(codes: Codes, groups: Tensor, scales: _Scales) -> Tensor:
    """Return scales and offsets in the form of panels, uint8 [num_rows, num_pieces, planes, bytes]."""
    planes = [codes.scales] if codes.offsets is None else [codes.scales, codes.offsets]
    if codes.factors is not None:
        assert codes.layout.groups_per_factor is not None
        numbers = torch.arange(codes.scales.shape[1]) + codes.layout.first_group
        factors = codes.factors[
            :, numbers // codes.layout.groups_per_factor
        ]  # [num_rows, num_groups, 1 or 2]
        # If a factor is 0, its scales are 0 whatever the integers are.
        planes = [(plane / factors[:, :, i]).nan_to_num() for i, plane in enumerate(planes)]
    if not torch.equal(groups, torch.arange(codes.scales.shape[1])):
        planes = [plane[:, groups] for plane in planes]
    stacked = torch.stack(planes, -1)  # [num_rows, num_pieces, planes]
    if scales.form == ScaleForm.uint4:
        return (stacked[:, :, :1] + 16 * stacked[:, :, 1:]).to(torch.uint8).unsqueeze(-1)
    dtype: torch.dtype = getattr(torch, scales.form.name)
    return stacked.to(dtype).unsqueeze(-1).contiguous().view(torch.uint8)


def _find_kind(layout: CodeLayout, rounds_activations: bool) -> Kind:
    if _is_packed(layout):
        return Kind(layout.bits, rounds_activations)
    has_any_numbers = LOOKS_UP_BYTES and bool(layout.table) and not _fits_bfloat16(layout.table)
    return Kind(8 if layout.bits == 8 else 4, rounds_activations, has_any_numbers)


def _find_tile_kernels(
    layout: CodeLayout, kind: Kind, by_kind: Mapping[Kind, CodeTileKernels]
) -> CodeTileKernels | None:
    """Return the kernels on tiles if there are any and codes are exact as elements of tiles."""
    is_exact = not layout.table or _fits_bfloat16(layout.table)
    return by_kind.get(kind) if is_exact else None


def _fits_bfloat16(table: tuple[float, ...]) -> bool:
    return all(float(torch.tensor(number).bfloat16()) == number for number in table)


def _find_order(group_of: Tensor) -> tuple[Tensor, _Pieces]:
    """Return the columns in the order of their groups, with -1 as padding of a group's last piece, and the
    pieces."""
    counts = group_of.bincount()
    sizes = counts[counts > 0]
    largest = int(sizes.max())
    columns = _find_columns(largest) if bool((sizes == largest).all()) else 0
    columns = columns or min(PIECE // 4, -(-largest // UNIT) * UNIT)
    parts = torch.split(group_of.argsort(stable=True), counts.tolist())
    whole = torch.cat([F.pad(part, (0, -len(part) % columns), value=-1) for part in parts])
    return whole, _Pieces(len(whole), columns)


def _arrange(codes: Codes, kind: Kind, pieces: _Pieces, order: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the codes of a kind of products in the order of pieces, uint8 [num_rows, units * UNIT], and the
    group of each piece, int64 [num_pieces]."""
    layout = codes.layout
    offset = _find_offset(layout, kind)
    values = codes.values.view(torch.uint8)
    values = values + offset if offset else values
    firsts = torch.arange(0, pieces.in_features, pieces.columns)  # of pieces
    if order is not None:
        assert codes.group_of is not None
        values = F.pad(values, (0, 1)).index_select(1, order % (values.shape[1] + 1))
        groups = codes.group_of[order[firsts]]
    else:
        groups = firsts // (layout.group or max(1, pieces.in_features))
    whole = _pad(values, pieces.count * pieces.columns)
    split = whole.view(len(values), pieces.count, pieces.columns)
    padded = _pad(split, pieces.units * UNIT).flatten(1)
    padded = padded[:, : ((pieces.count - 1) * pieces.units + pieces.last_units) * UNIT].contiguous()
    return padded, groups


def _pad(codes: Tensor, width: int) -> Tensor:
    """Return codes whose last axis is padded with zeros, or the codes themselves, because torch's function
    always copies."""
    return codes if codes.shape[-1] == width else F.pad(codes, (0, width - codes.shape[-1]))


def _find_offset(layout: CodeLayout, kind: Kind) -> int:
    """Return the difference, modulo 256, between codes of a kind of products and values of a layout."""
    if layout.table:
        return 0
    centre = 0 if layout.dtype == torch.int8 else 1 << (layout.bits - 1)
    half = 1 << (kind.bits - 1) if kind.is_unsigned else 0
    return (half - centre) % 256


def _put_zeros(zeros: Tensor, stored: Tensor, first: int, label: str) -> None:
    """Write the zeros of rows, [num_rows, num_pieces], beginning with row `first`, to those of panels."""
    if stored.numel() and not (stored.min() >= -128 and stored.max() <= 127):
        raise WeightsError(f"{label} has zero points outside the range of its codes")
    rows = torch.arange(first, first + len(stored))
    zeros[rows // COLUMNS, :, rows % COLUMNS] = stored.to(torch.int8)


def _make_table(layout: CodeLayout, kind: Kind) -> Tensor:
    table = torch.tensor(layout.table or range(-8, 8), dtype=torch.float32)
    return table.view(torch.uint8).view(16, 4).T.contiguous() if kind.has_halves else table


def _list_numbers(layout: CodeLayout, kind: Kind) -> Tensor:
    """Return the values of stored codes before scales and offsets."""
    if layout.table:
        return torch.tensor(layout.table)
    codes = torch.arange(1 << kind.bits) - _find_offset(layout, kind)
    is_signed = layout.dtype == torch.int8
    values = codes.to(torch.uint8).view(torch.int8) if is_signed else codes % (1 << kind.bits)
    if is_signed and kind.is_packed:
        values = (codes + (1 << (kind.bits - 1))) % (1 << kind.bits) - (1 << (kind.bits - 1))
    return values.float()


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()
