"""Format `bitsandbytes`, as release 0.50 writes it: 4-bit codes with a scale for each block of elements in
row-major order, or 8-bit integers with a scale for each row."""

import json
from dataclasses import dataclass
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from tgis.shard.checkpoint.code_matrix import CodeMatrix, as_slice
from tgis.shard.checkpoint.codes import CodeLayout, Codes
from tgis.shard.checkpoint.format import Tensors
from tgis.shard.checkpoint.tensors import ALL, FileTensor, StoredTensor, WeightsError
from tgis.shard.quant.code_tables import TABLES
from tgis.shard.quant.formats.settings import QuantizationSettings

DEFAULT_BLOCK = 64
_STATE = "quant_state.bitsandbytes__"
_MAX_STATE_BYTES = 4096
_STEP = 7.874015718698502e-3  # 1 / 127 as rounded in the library


class BitsAndBytes:
    def __init__(self, settings: QuantizationSettings):
        kind = settings.text("bnb_4bit_quant_type", "fp4")
        self._is_4bit = settings.flag("load_in_4bit")
        if kind not in TABLES:
            settings.refuse(f"bnb_4bit_quant_type {kind} is not one of {', '.join(TABLES)}")
        # The type of the tensors in which the codes' bytes are stored.
        name = settings.text("bnb_4bit_quant_storage", "uint8")
        storage = getattr(torch, name, None)
        if not isinstance(storage, torch.dtype):
            settings.refuse(f"bnb_4bit_quant_storage {name} is not a type of numbers")
        self._storage = storage
        self.layout = make_layout(kind, DEFAULT_BLOCK) if self._is_4bit else CodeLayout(torch.int8, 8, None)

    def open(self, tensors: Tensors, module: str) -> StoredTensor | None:
        name = f"{module}.weight"
        if name not in tensors:
            return None
        kind = next((kind for kind in TABLES if f"{name}.{_STATE}{kind}" in tensors), None)
        if kind is not None:
            return FourBitMatrix(tensors, name, kind)
        if f"{module}.SCB" in tensors:
            return EightBitMatrix(tensors, module)
        if (weight := tensors.fetch_any(name)).dtype in (torch.uint8, torch.int8):
            states = [f"{name}.{_STATE}{kind}" for kind in TABLES]
            missing = ", ".join((*states, f"{module}.SCB"))
            raise WeightsError(f"{weight.label} is quantized, but the checkpoint has none of {missing}")
        return None

    def count_weights(self, name: str, shape: tuple[int, ...]) -> int | None:
        is_packed = self._is_4bit and name.endswith(".weight") and len(shape) == 2 and shape[1] == 1
        return 2 * prod(shape) * self._storage.itemsize if is_packed else None


def make_layout(kind: str, block: int) -> CodeLayout:
    return CodeLayout(torch.uint8, 4, block, table=TABLES[kind])


class EightBitMatrix(CodeMatrix):
    """Matrix with weights code * scale / 127. `read` returns the same bits as the library. Products of codes,
    whose scales include the division, differ in the last bit."""

    def __init__(self, tensors: Tensors, module: str):
        self._weight, self._scales = (tensors.fetch_any(f"{module}.{end}") for end in ("weight", "SCB"))
        self._weight.check_type(torch.int8)
        self._scales.check_type(torch.float32)
        self._scales.check_shape(*self._weight.shape[:1])
        if f"{module}.weight_format" in tensors:
            _check_format(tensors.fetch_any(f"{module}.weight_format"))
        super().__init__(self._weight.shape, self._weight.label, CodeLayout(torch.int8, 8, None))

    def read(self, rows: slice = ALL, columns: slice = ALL) -> Tensor:
        scales = self._scales.read(rows).unsqueeze(1)  # [num_rows, 1]
        return self._weight.read(rows, columns).float().mul_(scales).mul_(_STEP)

    def take(self, rows: range, columns: range) -> Codes:
        values = self._weight.read(as_slice(rows), as_slice(columns))
        return Codes(self._layout, values, self._scales.read(as_slice(rows)).unsqueeze(1) * _STEP)


def _check_format(stored: FileTensor) -> None:
    """Raise WeightsError unless the matrix is stored in row-major order."""
    if stored.read().flatten().tolist() != [0]:
        raise WeightsError(f"{stored.label} is not 0: only row-major order is supported, not tiles")


class FourBitMatrix(CodeMatrix):
    """Matrix in blocks of 4-bit codes in row-major order, two per byte, the first in the upper half. If
    blocks extend over the ends of rows, the matrix can only be read as floats."""

    def __init__(self, tensors: Tensors, name: str, kind: str):
        packed = tensors.fetch_any(name)
        state = _read_state(tensors.fetch_any(f"{name}.{_STATE}{kind}"))
        num_elements = prod(state.shape)
        self._bytes = packed.as_bytes()
        if self._bytes.shape[0] != -(-num_elements // 2):
            raise WeightsError(
                f"{packed.label} has {self._bytes.shape[0]} bytes, which do not hold {list(state.shape)} "
                "weights of 4 bits"
            )
        _check_table(tensors.fetch_any(f"{name}.quant_map"), kind)
        num_blocks = -(-num_elements // state.block)
        kind_of_scales = PlainScales if state.nested is None else NestedScales
        self._scales = kind_of_scales(tensors, name, state, num_blocks)
        super().__init__(state.shape, packed.label, make_layout(kind, state.block))
        self._block = state.block

    def layout(self, columns: slice = ALL) -> CodeLayout | None:
        return None if self.shape[1] % self._block else super().layout(columns)

    def read(self, rows: slice = ALL, columns: slice = ALL) -> Tensor:
        row_range = range(self.shape[0])[rows]
        width = self.shape[1]
        first, last = row_range.start * width, row_range.stop * width
        blocks = range(first // self._block, -(-last // self._block))
        weights = self._take_blocks(blocks).dequantize().flatten()
        first -= blocks.start * self._block
        return weights[first:][: len(row_range) * width].view(-1, width)[:, columns].contiguous()

    def take(self, rows: range, columns: range) -> Codes:
        per_row = self.shape[1] // self._block
        codes = self._take_blocks(range(rows.start * per_row, rows.stop * per_row))
        values = codes.values.view(-1, self.shape[1])[:, as_slice(columns)]
        groups = slice(columns.start // self._block, columns.stop // self._block)
        return Codes(self._layout, values.contiguous(), codes.scales.view(-1, per_row)[:, groups])

    def _take_blocks(self, blocks: range) -> Codes:
        """Return blocks as rows of a matrix. The last one may be padded."""
        half = self._block // 2
        pairs = self._bytes.read(slice(blocks.start * half, blocks.stop * half))
        pairs = F.pad(pairs, (0, -len(pairs) % half)).unsqueeze(1)  # [num_bytes, 1]
        values = torch.cat((pairs >> 4, pairs & 15), 1).view(-1, self._block)
        return Codes(self._layout, values, self._scales.read(blocks).unsqueeze(1))


@dataclass(frozen=True)
class _State:
    """Metadata of a 4-bit matrix."""

    shape: tuple[int, int]
    block: int
    nested: "_Nested | None"


@dataclass(frozen=True)
class _Nested:
    """Metadata of scales that are stored as 8-bit codes."""

    block: int
    offset: float


class PlainScales:
    def __init__(self, tensors: Tensors, name: str, state: _State, num_blocks: int):
        self._scales = tensors.fetch_any(f"{name}.absmax")
        self._scales.check_type(torch.float32)
        self._scales.check_shape(num_blocks)

    def read(self, blocks: range) -> Tensor:
        """Return the scales of a range of blocks, float32 [num_blocks]."""
        return self._scales.read(as_slice(blocks))


class NestedScales:
    """Scales table[code] * scale + offset. Each block of adjacent codes has an outer scale."""

    def __init__(self, tensors: Tensors, name: str, state: _State, num_blocks: int):
        assert state.nested is not None
        self._nested = state.nested
        self._codes = tensors.fetch_any(f"{name}.absmax")
        self._codes.check_type(torch.uint8)
        self._codes.check_shape(num_blocks)
        self._table, self._scales = (
            tensors.fetch_any(f"{name}.nested_{end}") for end in ("quant_map", "absmax")
        )
        for tensor, count in ((self._table, 256), (self._scales, -(-num_blocks // self._nested.block))):
            tensor.check_type(torch.float32)
            tensor.check_shape(count)

    def read(self, blocks: range) -> Tensor:
        """Return the scales of a range of blocks, float32 [num_blocks]."""
        numbers = self._table.read()[self._codes.read(as_slice(blocks)).int()]
        outer = torch.arange(blocks.start, blocks.stop) // self._nested.block
        return numbers * self._scales.read()[outer] + self._nested.offset


def _read_state(stored: FileTensor) -> _State:
    """Read metadata, JSON in a tensor of bytes. Raises WeightsError."""
    stored.check_type(torch.uint8)
    if prod(stored.shape) > _MAX_STATE_BYTES:
        raise WeightsError(f"{stored.label} has {prod(stored.shape)} bytes, more than {_MAX_STATE_BYTES}")
    try:
        state = json.loads(bytes(stored.read().flatten().tolist()))
        [height, width], block = state["shape"], state["blocksize"]
        nested = None
        if "nested_offset" in state:
            nested = _Nested(state["nested_blocksize"], float(state["nested_offset"]))
        sizes = (height, width, block, nested.block if nested else 1)
        if not all(type(size) is int and size > 0 for size in sizes) or block % 2:
            raise ValueError("a size is not a positive integer")
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise WeightsError(
            f"{stored.label} is not the JSON of a matrix's shape and blocksize, and of nested_blocksize and "
            "nested_offset where scales are codes"
        ) from error
    return _State((height, width), block, nested)


def _check_table(stored: FileTensor, kind: str) -> None:
    """Raise WeightsError unless a stored table equals the known one."""
    stored.check_type(torch.float32)
    stored.check_shape(16)
    if not torch.allclose(stored.read(), torch.tensor(TABLES[kind]), rtol=0, atol=1e-3):
        raise WeightsError(f"{stored.label} is not the table of {kind}")
