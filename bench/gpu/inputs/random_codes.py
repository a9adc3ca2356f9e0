"""Creates weights of random codes on the device that computes with them."""

import torch
from torch import Tensor

from bench.shapes import INIT_STD
from tgis.shard.checkpoint.codes import CodeLayout, Codes
from tgis.shard.checkpoint.tensors import ALL
from tgis.shard.kernels.cuda.codes.packed import PackedCodes
from tgis.shard.kernels.cuda.codes.packing import pack

FOUR_BITS = CodeLayout(torch.uint8, 4, 128, has_zeros=True)


class RandomCodes:
    """`Stored` matrix of integer codes with adjacent groups."""

    def __init__(self, layout: CodeLayout, shape: tuple[int, ...], label: str, device: torch.device):
        self._layout, self.shape, self.label, self._device = layout, shape, label, device

    def read(self, rows: slice = ALL, columns: slice = ALL) -> Tensor:
        return self.codes(rows, columns).dequantize()

    def layout(self, columns: slice = ALL) -> CodeLayout:
        return self._layout

    def codes(self, rows: slice = ALL, columns: slice = ALL) -> Codes:
        layout, device = self._layout, self._device
        height, width = (
            len(range(size)[part]) for size, part in zip(self.shape, (rows, columns), strict=True)
        )
        lowest = 0 if layout.dtype == torch.uint8 else -(1 << (layout.bits - 1))
        values = torch.randint(lowest, lowest + (1 << layout.bits), (height, width), device=device)
        planes = height, -(-width // (layout.group or width))
        scales = torch.full(planes, INIT_STD * 4 / (1 << layout.bits), device=device).half().float()
        zeros = torch.full(planes, float(1 << (layout.bits - 1)), device=device) if layout.has_zeros else None
        return Codes(layout, values.to(layout.dtype), scales, zeros)


def draw_packed(layout: CodeLayout, rows: int, columns: int, device: torch.device) -> PackedCodes:
    return pack(RandomCodes(layout, (rows, columns), "random codes", device), device)
