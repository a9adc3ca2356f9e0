"""Packs codes of a checkpoint or a scheme for a GPU's products, a few rows at a time."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tgis.shard.checkpoint.codes import CodeLayout, Codes
from tgis.shard.checkpoint.tensors import Stored, WeightsError
from tgis.shard.kernels.cuda.codes.packed import MAX_PIECE, MIN_PIECE, OUTPUTS, Numbers, PackedCodes

_ELEMENTS = 1 << 22  # approximate number of codes packed at a time
_FLOAT8 = torch.float8_e4m3fn
_SMALL = torch.float16, torch.bfloat16
_ONE_GROUP = 1 << 24  # pieces of a group that holds all columns
_MAX_ZERO = 1 << 10
_ZERO_BYTES = 2


def can_pack(layout: CodeLayout) -> bool:
    """Return True if `pack` supports a layout."""
    if layout.dtype not in (torch.int8, torch.uint8, _FLOAT8) or (layout.table and layout.bits > 4):
        return False
    return layout.group is None or find_piece(layout.group) >= MIN_PIECE


def find_piece(group: int) -> int:
    """Return the largest power of two that divides a group, at most MAX_PIECE."""
    return min(group & -group, MAX_PIECE)


def count_bits(layout: CodeLayout) -> int:
    """Return the bits of a packed code."""
    return 4 if layout.bits <= 4 else 8


def count_bytes(layout: CodeLayout) -> float:
    """Return the bytes per weight of packed codes. Scales take at most this."""
    if layout.group is None:
        return count_bits(layout) / 8
    scale_bytes = 2 if layout.scale_type in ("float16", "bfloat16") else 4
    planes = scale_bytes * (1 + layout.has_offsets) + _ZERO_BYTES * layout.has_zeros
    return count_bits(layout) / 8 + planes / layout.group


class _Columns(NamedTuple):
    """Order and groups of a matrix's columns."""

    piece: int
    pieces_per_group: int
    order: Tensor | None  # int64, of `PackedCodes`


class _Part(NamedTuple):
    """Packed rows."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    offsets: Tensor | None


def pack(weight: Stored, device: torch.device) -> PackedCodes:
    """Pack the codes of a weight [out_features, in_features]. Raises WeightsError."""
    layout = weight.layout()
    assert layout is not None
    out_features, in_features = weight.shape
    columns = _find_columns(weight, layout)
    step = max(1, _ELEMENTS // (OUTPUTS * in_features)) * OUTPUTS
    codes = torch.empty(0)
    planes = list[_Part]()
    for first in range(0, out_features, step):
        part = _pack_rows(weight.codes(slice(first, first + step)), columns, weight.label)
        if not first:
            shape = -(-out_features // OUTPUTS), *part.codes.shape[1:]
            codes = torch.empty(shape, dtype=torch.uint8, device=device)
        codes[first // OUTPUTS :][: len(part.codes)] = part.codes.to(device)
        planes.append(part._replace(codes=codes))
    scales, offsets = _shrink(
        *(_join([getattr(each, name) for each in planes]) for name in ("scales", "offsets"))
    )
    assert scales is not None
    zeros = _join([each.zeros for each in planes])
    order = columns.order
    return PackedCodes(
        out_features=out_features,
        in_features=in_features,
        bits=count_bits(layout),
        numbers=_name_numbers(layout),
        piece=columns.piece,
        pieces_per_group=columns.pieces_per_group,
        centre=_find_centre(layout),
        codes=codes,
        scales=scales.to(device),
        zeros=None if zeros is None else zeros.to(device),
        offsets=None if offsets is None else offsets.to(device),
        table=_make_table(layout.table).to(device) if layout.table else None,
        order=None if order is None else order.int().to(device),
    )


def _name_numbers(layout: CodeLayout) -> Numbers:
    if layout.table:
        return "table"
    return "float8" if layout.dtype == _FLOAT8 else "integers"


def _find_centre(layout: CodeLayout) -> int:
    """Return the number that is added to values, so that codes are not negative."""
    return 1 << (layout.bits - 1) if layout.dtype == torch.int8 and not layout.table else 0


def _make_table(table: Sequence[float]) -> Tensor:
    return torch.tensor([*table, *[0.0] * (16 - len(table))])


def _find_columns(weight: Stored, layout: CodeLayout) -> _Columns:
    if not layout.is_reordered:
        if layout.group is None:
            return _Columns(MAX_PIECE, _ONE_GROUP, None)
        piece = find_piece(layout.group)
        return _Columns(piece, layout.group // piece, None)
    group_of = weight.codes(slice(0, 0)).group_of
    assert group_of is not None
    counts = group_of.bincount()
    largest = -(-int(counts.max()) // MIN_PIECE) * MIN_PIECE
    width = next((size for size in (16, 32, 64) if size >= largest), -(-largest // 64) * 64)
    parts = torch.split(group_of.argsort(stable=True), counts.tolist())
    order = torch.cat([F.pad(part, (0, width - len(part)), value=-1) for part in parts])
    piece = find_piece(width)
    return _Columns(piece, width // piece, F.pad(order, (0, -len(order) % (2 * piece)), value=-1))


def _pack_rows(codes: Codes, columns: _Columns, label: str) -> _Part:
    """Pack rows that begin with a panel."""
    centre = _find_centre(codes.layout)
    order = columns.order
    tile = 2 * columns.piece
    values = codes.values.contiguous().view(torch.uint8)
    if centre:
        values = values + centre  # modulo 256
    if order is not None:
        values = F.pad(values, (0, 1)).index_select(1, order.where(order >= 0, values.shape[1]))
    values = F.pad(values, (0, -values.shape[1] % tile, 0, -len(values) % OUTPUTS))
    num_tiles = values.shape[1] // tile
    packed = values.view(-1, OUTPUTS, num_tiles, 2, columns.piece).permute(0, 2, 3, 1, 4)
    if count_bits(codes.layout) == 4:
        packed = (packed[:, :, 0] & 15) | packed[:, :, 1] << 4
    num_groups = -(-2 * num_tiles // columns.pieces_per_group)
    zeros = None
    if codes.zeros is not None:
        if not (codes.zeros.abs() <= _MAX_ZERO).all():
            raise WeightsError(f"{label} has zero points outside the range of its codes")
        zeros = _arrange(codes.zeros + centre, num_groups).short()
    offsets = None if codes.offsets is None else _arrange(codes.offsets, num_groups)
    return _Part(packed.contiguous(), _arrange(codes.scales, num_groups), zeros, offsets)


def _arrange(plane: Tensor, num_groups: int) -> Tensor:
    """Return scales, zeros or offsets, [num_rows, any], as [num_panels, num_groups, OUTPUTS]."""
    padded = F.pad(plane, (0, num_groups - plane.shape[1], 0, -len(plane) % OUTPUTS))
    return padded.view(-1, OUTPUTS, num_groups).transpose(1, 2).contiguous()


def _join(planes: Sequence[Tensor | None]) -> Tensor | None:
    present = [plane for plane in planes if plane is not None]
    return torch.cat(present) if present else None


def _shrink(*planes: Tensor | None) -> list[Tensor | None]:
    """Return planes in a 16-bit type that holds all of their numbers, if there is one."""
    for dtype in _SMALL:
        if all(plane is None or torch.equal(plane.to(dtype).float(), plane) for plane in planes):
            return [None if plane is None else plane.to(dtype) for plane in planes]
    return list(planes)
