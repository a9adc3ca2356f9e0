"""Random matrices of codes, of every form that products support."""

import math
from functools import cache

import torch

from tgis.shard.checkpoint.codes import CodeLayout, Codes
from tgis.shard.checkpoint.tensors import ALL
from tgis.shard.kernels.cuda.codes.packed import PackedCodes
from tgis.shard.kernels.cuda.codes.packing import pack
from tgis.shard.quant.code_tables import E2M1

NUM_ROWS = 70  # the last panel is partial
LAYOUTS = (
    CodeLayout(torch.uint8, 4, 128, has_zeros=True),  # GPTQ, AWQ
    CodeLayout(torch.uint8, 4, None, has_zeros=True, is_reordered=True),
    CodeLayout(torch.int8, 4, 64, has_offsets=True, scale_type="float16"),  # --quantize int4
    CodeLayout(torch.uint8, 4, 32, table=E2M1, scale_type="bfloat16"),  # MXFP4
    CodeLayout(torch.int8, 8, None),
    CodeLayout(torch.int8, 8, 16),
    CodeLayout(torch.float8_e4m3fn, 8, None),
)


class DrawnCodes:
    """`Stored` codes in memory."""

    label = "random codes"

    def __init__(self, codes: Codes):
        self._codes = codes
        self.shape = tuple(codes.values.shape)

    def read(self, rows: slice = ALL, columns: slice = ALL) -> torch.Tensor:
        return self._codes.dequantize()[rows, columns]

    def layout(self, columns: slice = ALL) -> CodeLayout:
        return self._codes.layout

    def codes(self, rows: slice = ALL, columns: slice = ALL) -> Codes:
        whole = self._codes
        zeros, offsets = (None if x is None else x[rows] for x in (whole.zeros, whole.offsets))
        return Codes(whole.layout, whole.values[rows], whole.scales[rows], zeros, whole.group_of, offsets)


@cache
def draw_packed(layout: CodeLayout, in_features: int, num_rows: int = NUM_ROWS) -> PackedCodes:
    return pack(DrawnCodes(draw_codes(layout, in_features, num_rows)), torch.device("cpu"))


def draw_codes(layout: CodeLayout, in_features: int, num_rows: int = NUM_ROWS) -> Codes:
    """Return codes on the CPU. Weights are about as large as 1 / sqrt(in_features). A reordered matrix has
    groups of at most 64 columns."""
    generator = torch.Generator().manual_seed(0)
    lowest = 0 if layout.dtype == torch.uint8 else -(1 << (layout.bits - 1))
    shape = num_rows, in_features
    if layout.dtype == torch.float8_e4m3fn:
        values = torch.randn(shape, generator=generator).to(layout.dtype)
        spread = 1.0
    else:
        drawn = torch.randint(lowest, lowest + (1 << layout.bits), shape, generator=generator)
        values = drawn.to(layout.dtype)
        spread = 1.0 if layout.table else (1 << layout.bits) / 4
    group = layout.group or in_features
    group_of = None
    if layout.is_reordered:
        group = min(64, in_features)
        group_of = (torch.arange(in_features) // group)[torch.randperm(in_features, generator=generator)]
    planes = num_rows, -(-in_features // group)
    scales = (
        (1 + torch.rand(planes, generator=generator)).half().float()
        / spread
        / 2 ** round(math.log2(in_features) / 2)
    )
    zeros = (
        torch.randint(0, 1 << layout.bits, planes, generator=generator).float() if layout.has_zeros else None
    )
    offsets = (
        (scales * torch.randn(planes, generator=generator)).half().float() if layout.has_offsets else None
    )
    if layout.scale_type == "bfloat16":
        scales = scales.bfloat16().float()
    return Codes(layout, values, scales, zeros, group_of, offsets)
