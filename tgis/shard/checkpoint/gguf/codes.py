"""GGUF types that the service keeps as codes: functions that unpack blocks to codes, scales and offsets, and
the resulting layouts. The numbers equal those of the `gguf` package bit for bit."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from tgis.shard.checkpoint.codes import CodeLayout, Codes

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


class Blocks(NamedTuple):
    """Unpacked blocks. Values are [num_rows, num_blocks, block_elements]; scales and offsets are [num_rows,
    num_blocks, groups_per_block]. With factors [num_rows, num_blocks, 1 or 2], scales and offsets are
    integers: the first factor multiplies the scales, the second the offsets."""

    values: NDArray[Any]
    scales: Floats
    offsets: Floats | None = None
    factors: Floats | None = None


class Coding(NamedTuple):
    """Layout of a GGUF type and its function to unpack blocks [num_rows, num_blocks, block_bytes]."""

    layout: CodeLayout
    unpack: Callable[[Bytes], Blocks]

    def make_codes(self, blocks: Bytes, columns: range) -> Codes:
        """Return the codes of `columns`, which are whole groups and are counted from the first block."""
        unpacked = self.unpack(blocks)
        group = self.layout.group
        assert group is not None
        groups = slice(columns.start // group, columns.stop // group)
        scales = unpacked.scales
        offsets = unpacked.offsets
        factors = None
        if unpacked.factors is not None:
            scales = scales * unpacked.factors[:, :, :1]
            offsets = None if offsets is None else offsets * unpacked.factors[:, :, 1:]
            factors = torch.from_numpy(unpacked.factors)
        return Codes(
            self.cut_layout(columns.start),
            torch.from_numpy(_join_blocks(unpacked.values)[:, columns.start : columns.stop]),
            torch.from_numpy(_join_blocks(scales)[:, groups]),
            offsets=None if offsets is None else torch.from_numpy(_join_blocks(offsets)[:, groups]),
            factors=factors,
        )

    def cut_layout(self, first_column: int) -> CodeLayout:
        """Return the layout of the columns from `first_column` on, which must begin a group."""
        layout = self.layout
        if layout.groups_per_factor is None or layout.group is None:
            return layout
        return replace(layout, first_group=first_column // layout.group % layout.groups_per_factor)


def _join_blocks(x: NDArray[Any]) -> NDArray[Any]:
    return x.reshape(len(x), -1)


def _split_bytes(x: Bytes, bits: int) -> Bytes:
    """Split bytes into integers of `bits` bits: [..., n] -> [..., 8 / bits, n], lowest bits first."""
    integers = np.empty((*x.shape[:-1], 8 // bits, x.shape[-1]), np.uint8)
    mask = np.uint8((1 << bits) - 1)
    np.bitwise_and(x, mask, out=integers[..., 0, :])
    for index in range(1, 8 // bits):
        part = integers[..., index, :]
        np.right_shift(x, np.uint8(bits * index), out=part)
        if bits * (index + 1) < 8:
            part &= mask
    return integers


def _unpack(x: Bytes, bits: int, run: int) -> Bytes:
    """Unpack integers of `bits` bits from each run of `run` bytes, in the order of `_split_bytes`."""
    return _split_bytes(x.reshape(*x.shape[:2], -1, run), bits).reshape(*x.shape[:2], -1)


def _halves(x: Bytes) -> Floats:
    """Convert bytes that hold float16 numbers."""
    return np.ascontiguousarray(x).view(np.float16).astype(np.float32)


def _unpack_q4_0(blocks: Bytes) -> Blocks:
    return Blocks(_unpack(blocks[:, :, 2:], 4, 16).view(np.int8) - np.int8(8), _halves(blocks[:, :, :2]))


def _unpack_q4_1(blocks: Bytes) -> Blocks:
    return Blocks(_unpack(blocks[:, :, 4:], 4, 16), *_split_halves(blocks))


def _unpack_q5_0(blocks: Bytes) -> Blocks:
    values = _unpack_5_bits(blocks[:, :, 2:])
    return Blocks(values.view(np.int8) - np.int8(16), _halves(blocks[:, :, :2]))


def _unpack_q5_1(blocks: Bytes) -> Blocks:
    return Blocks(_unpack_5_bits(blocks[:, :, 4:]), *_split_halves(blocks))


def _unpack_5_bits(x: Bytes) -> Bytes:
    high = np.unpackbits(np.ascontiguousarray(x[:, :, :4]), axis=-1, bitorder="little")
    return _unpack(x[:, :, 4:], 4, 16) | high << np.uint8(4)


def _split_halves(blocks: Bytes) -> tuple[Floats, Floats]:
    both = _halves(blocks[:, :, :4])
    return both[:, :, :1], both[:, :, 1:]


def _unpack_q8_0(blocks: Bytes) -> Blocks:
    return Blocks(blocks[:, :, 2:].view(np.int8), _halves(blocks[:, :, :2]))


def _unpack_q2_k(blocks: Bytes) -> Blocks:
    both = blocks[:, :, :16]
    scales, offsets = (each.astype(np.float32) for each in (both & np.uint8(15), both >> np.uint8(4)))
    return Blocks(_unpack(blocks[:, :, 16:80], 2, 32), scales, offsets, _k_factors(blocks[:, :, 80:]))


def _unpack_q3_k(blocks: Bytes) -> Blocks:
    values = _unpack(blocks[:, :, 32:96], 2, 32) | _unpack(blocks[:, :, :32], 1, 32) << np.uint8(2)
    packed = blocks[:, :, 96:108]
    scales = _unpack(packed[:, :, :8], 4, 8) | _unpack(packed[:, :, 8:], 2, 4) << np.uint8(4)
    return Blocks(
        values.view(np.int8) - np.int8(4),
        scales.astype(np.float32) - np.float32(32),
        factors=_halves(blocks[:, :, 108:]),
    )


def _unpack_q4_k(blocks: Bytes) -> Blocks:
    return Blocks(_unpack(blocks[:, :, 16:], 4, 32), *_k_scales(blocks[:, :, 4:16]), _k_factors(blocks))


def _unpack_q5_k(blocks: Bytes) -> Blocks:
    values = _unpack(blocks[:, :, 48:], 4, 32) | _unpack(blocks[:, :, 16:48], 1, 32) << np.uint8(4)
    return Blocks(values, *_k_scales(blocks[:, :, 4:16]), _k_factors(blocks))


def _k_scales(packed: Bytes) -> tuple[Floats, Floats]:
    """Unpack the scales and offsets in 12 bytes. For the last four groups, the lower 4 bits are in the last
    four bytes, and the upper 2 bits are in the upper bits of the other bytes."""
    both = packed[:, :, :8]
    last = packed[:, :, 8:]
    lower = np.concatenate((last & np.uint8(15), last >> np.uint8(4)), -1)
    late = lower | both >> np.uint8(6) << np.uint8(4)
    early = both & np.uint8(63)
    scales = np.concatenate((early[:, :, :4], late[:, :, :4]), -1)
    offsets = np.concatenate((early[:, :, 4:], late[:, :, 4:]), -1)
    return scales.astype(np.float32), offsets.astype(np.float32)


def _k_factors(blocks: Bytes) -> Floats:
    """Return the factors of scales and offsets. The file's offsets are subtracted, hence the sign."""
    return _halves(blocks[:, :, :4]) * np.array([1, -1], np.float32)


def _unpack_q6_k(blocks: Bytes) -> Blocks:
    values = _unpack(blocks[:, :, :128], 4, 64) | _unpack(blocks[:, :, 128:192], 2, 32) << np.uint8(4)
    scales = blocks[:, :, 192:208].view(np.int8).astype(np.float32)
    return Blocks(values.view(np.int8) - np.int8(32), scales, factors=_halves(blocks[:, :, 208:]))


def _unpack_iq4_nl(blocks: Bytes) -> Blocks:
    return Blocks(_unpack(blocks[:, :, 2:], 4, 16), _halves(blocks[:, :, :2]))


def _unpack_iq4_xs(blocks: Bytes) -> Blocks:
    lower = _split_bytes(blocks[:, :, 4:8], 4).swapaxes(-1, -2).reshape(*blocks.shape[:2], 8)
    upper = _split_bytes(blocks[:, :, 2:4], 2).swapaxes(-1, -2).reshape(*blocks.shape[:2], 8)
    scales = (lower | upper << np.uint8(4)).astype(np.float32) - np.float32(32)
    return Blocks(_unpack(blocks[:, :, 8:], 4, 16), scales, factors=_halves(blocks[:, :, :2]))


def _unpack_mxfp4(blocks: Bytes) -> Blocks:
    # The table holds doubled numbers, so the scales are half of the format's.
    scales = np.ldexp(np.float32(1), blocks[:, :, :1].astype(np.int32) - 128)
    return Blocks(_unpack(blocks[:, :, 1:], 4, 16), scales)


# Values of the codes of llama.cpp's IQ4 types.
_IQ4 = (-127.0, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
# Doubled values of 4-bit floats: one sign bit, two exponent bits and one mantissa bit.
_FP4 = (0.0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def _signed(bits: int) -> CodeLayout:
    return CodeLayout(torch.int8, bits, 32, scale_type="float16")


def _with_offsets(bits: int) -> CodeLayout:
    return CodeLayout(torch.uint8, bits, 32, scale_type="float16", has_offsets=True)


def _k_layout(bits: int, group: int, has_offsets: bool) -> CodeLayout:
    dtype = torch.uint8 if has_offsets else torch.int8
    per_factor = 256 // group
    return CodeLayout(
        dtype, bits, group, has_offsets=has_offsets, scale_type="int8", groups_per_factor=per_factor
    )


CODINGS = {
    "Q4_0": Coding(_signed(4), _unpack_q4_0),
    "Q4_1": Coding(_with_offsets(4), _unpack_q4_1),
    "Q5_0": Coding(_signed(5), _unpack_q5_0),
    "Q5_1": Coding(_with_offsets(5), _unpack_q5_1),
    "Q8_0": Coding(_signed(8), _unpack_q8_0),
    "Q2_K": Coding(replace(_k_layout(2, 16, True), scale_type="uint4"), _unpack_q2_k),
    "Q3_K": Coding(_k_layout(3, 16, False), _unpack_q3_k),
    "Q4_K": Coding(_k_layout(4, 32, True), _unpack_q4_k),
    "Q5_K": Coding(_k_layout(5, 32, True), _unpack_q5_k),
    "Q6_K": Coding(_k_layout(6, 16, False), _unpack_q6_k),
    "IQ4_NL": Coding(CodeLayout(torch.uint8, 4, 32, table=_IQ4, scale_type="float16"), _unpack_iq4_nl),
    "IQ4_XS": Coding(
        CodeLayout(torch.uint8, 4, 32, table=_IQ4, scale_type="int8", groups_per_factor=8), _unpack_iq4_xs
    ),
    "MXFP4": Coding(CodeLayout(torch.uint8, 4, 32, table=_FP4, scale_type="bfloat16"), _unpack_mxfp4),
}
"""Codings by GGUF type name."""
