"""Matrices of random codes, of every kind of layout, for tests of products."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from tgis.shard.checkpoint.codes import CodeLayout, Codes
from tgis.shard.checkpoint.tensors import ALL

TABLE = tuple(math.sin(i) for i in range(16))


class Case(NamedTuple):
    layout: CodeLayout
    num_columns: int
    groups: tuple[int, ...] = ()  # columns per group of a reordered matrix


CASES = {
    "4 bits": Case(CodeLayout(torch.int8, 4, 128), 1280),
    "4 bits, the last group is partial": Case(CodeLayout(torch.int8, 4, 128), 333),
    "4 bits, zeros": Case(CodeLayout(torch.uint8, 4, 32, True), 257),
    "4 bits, groups that are cut": Case(CodeLayout(torch.uint8, 4, 192, True), 400),
    "4 bits, groups of odd size": Case(CodeLayout(torch.uint8, 4, 27, True), 100),
    "4 bits, one group": Case(CodeLayout(torch.uint8, 4, None, True), 300),
    "4 bits, reordered": Case(CodeLayout(torch.uint8, 4, None, True, True), 256, (64,) * 4),
    "4 bits, groups of all sizes": Case(CodeLayout(torch.uint8, 4, None, True, True), 150, (7, 0, 60, 1, 82)),
    "4 bits, small groups": Case(CodeLayout(torch.uint8, 4, None, True, True), 300, (7, 8, 1, 5, 4) * 12),
    "3 bits": Case(CodeLayout(torch.uint8, 3, 64, True), 128),
    "2 bits": Case(CodeLayout(torch.uint8, 2, 16, True), 50),
    "a table": Case(CodeLayout(torch.uint8, 4, 64, table=TABLE), 200),
    "8 bits": Case(CodeLayout(torch.int8, 8, None), 129),
    "8 bits, zeros": Case(CodeLayout(torch.uint8, 8, 64, True), 130),
}
INTEGERS = [name for name in CASES if name != "a table"]


class CodesInMemory:
    label = "a weight"

    def __init__(self, codes: Codes):
        self._codes, self.shape = codes, tuple(codes.values.shape)

    def read(self, rows: slice = ALL, columns: slice = ALL) -> Tensor:
        return self._codes.dequantize()[rows, columns]

    def layout(self, columns: slice = ALL) -> CodeLayout:
        return self._codes.layout

    def codes(self, rows: slice = ALL, columns: slice = ALL) -> Codes:
        whole = self._codes
        zeros = None if whole.zeros is None else whole.zeros[rows]
        return Codes(whole.layout, whole.values[rows], whole.scales[rows], zeros, whole.group_of)


def draw(case: Case, num_rows: int) -> Codes:
    layout, width = case.layout, case.num_columns
    is_signed, largest = layout.dtype == torch.int8, 1 << layout.bits
    low = -largest // 2 if is_signed else 0
    values = torch.randint(low, low + largest, (num_rows, width)).to(layout.dtype)
    group_of = None
    if layout.is_reordered:
        group_of = torch.arange(len(case.groups)).repeat_interleave(torch.tensor(case.groups))
        group_of = group_of[torch.randperm(width)]
    num_groups = len(case.groups) or -(-width // (layout.group or width))
    zeros = torch.randint(0, largest, (num_rows, num_groups)).float() if layout.has_zeros else None
    return Codes(layout, values, torch.rand(num_rows, num_groups) + 0.1, zeros, group_of)


def expand(codes: Codes) -> tuple[Tensor, Tensor, Tensor]:
    """Return the value, zero and scale of every weight, float64 [num_rows, num_columns]."""
    width = codes.values.shape[1]
    group_of = codes.group_of
    if group_of is None:
        group_of = torch.arange(width) // (codes.layout.group or width)
    numbers = codes.values.double()
    if codes.layout.table:
        numbers = torch.tensor(codes.layout.table, dtype=torch.float64)[codes.values.long()]
    zeros = torch.zeros_like(numbers) if codes.zeros is None else codes.zeros[:, group_of].double()
    return numbers, zeros, codes.scales[:, group_of].double()
