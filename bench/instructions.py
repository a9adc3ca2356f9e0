"""Measures the processor's peak rates of 16-bit and 8-bit multiplications: loops over registers on all cores,
with the instructions of bfloat16 and int8 products."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from llvmlite import ir
from numba import carray

from tgis.shard.kernels.cpu.jit import llvm
from tgis.shard.kernels.cpu.jit.compiler import Kernel, llvm_function, next_unit
from tgis.shard.kernels.cpu.jit.llvm import BFLOAT, FLOAT, I32, I64

LANES = 16
VECTOR_BYTES = 4 * LANES
SUMS = 16  # more than the number of instructions that one core has in flight
UNITS, STEPS = 64, 1 << 14  # one work unit takes a tenth of a millisecond
BITS = 0x3F  # value of every byte of the factors: ordinary numbers in both types


def _make_loop(intrinsic: str, factor: Any, total: Any) -> Any:
    """Build a function for kernels that repeatedly adds the product of two vectors to SUMS others."""
    vector, sums = ir.VectorType(*factor), ir.VectorType(total, LANES)

    @llvm_function()
    def run(b: Any, operands: Any, out: Any, num_steps: Any) -> None:
        def load(index: int, kind: Any) -> Any:
            return b.load(llvm.pointer_to(b, kind, operands, I64(VECTOR_BYTES * index)), align=4)

        x, y = load(0, vector), load(1, vector)
        # LLVM does not merge SUMS computations that it does not know to be equal.
        begin = [load(2 + index, sums) for index in range(SUMS)]

        def step(_: Any, totals: list[Any]) -> list[Any]:
            return [llvm.call(b, intrinsic, sums, each, x, y) for each in totals]

        for index, each in enumerate(llvm.loop(b, num_steps, begin, step)):
            b.store(each, llvm.pointer_to(b, sums, out, I64(VECTOR_BYTES * index)), align=4)

    return run


_run_pairs = _make_loop(f"llvm.x86.avx512bf16.dpbf16ps.{32 * LANES}", (BFLOAT, 2 * LANES), FLOAT)
_run_quads = _make_loop(f"llvm.x86.avx512.vpdpbusd.{32 * LANES}", (I32, LANES), I32)


def _multiply_pairs_in_registers(args: Any) -> None:
    a = carray(args, 5)
    unit = next_unit(args)
    while unit < a[1]:
        _run_pairs(a[3], a[4] + unit * SUMS * VECTOR_BYTES, a[2])
        unit = next_unit(args)


def _multiply_quads_in_registers(args: Any) -> None:
    a = carray(args, 5)
    unit = next_unit(args)
    while unit < a[1]:
        _run_quads(a[3], a[4] + unit * SUMS * VECTOR_BYTES, a[2])
        unit = next_unit(args)


@dataclass(frozen=True)
class Instruction:
    feature: str
    """LLVM's name of the processor feature that the instruction needs."""
    kernel: Kernel
    operations: int
    """Number of multiplications and additions of one instruction."""

    @property
    def is_supported(self) -> bool:
        return llvm.has_feature(self.feature) and llvm.has_feature("avx512f")

    def prepare(self) -> Callable[[], None]:
        """Return a function that computes `num_operations` operations on all of torch's threads."""
        operands, out = make_operands(), torch.empty(UNITS, SUMS, LANES)  # out: [UNITS, SUMS, LANES]

        def work() -> None:
            self.kernel.parallel(UNITS, STEPS, operands.data_ptr(), out.data_ptr())

        return work

    @property
    def num_operations(self) -> int:
        return UNITS * STEPS * SUMS * self.operations


def make_operands() -> torch.Tensor:
    """Return int8 [2 + SUMS, VECTOR_BYTES]: two factors, and the initial sums."""
    operands = torch.zeros(2 + SUMS, VECTOR_BYTES, dtype=torch.int8)
    operands[:2] = BITS
    return operands


PAIRS = Instruction("avx512bf16", Kernel(_multiply_pairs_in_registers), 2 * 2 * LANES)
"""vdpbf16ps: two products of bfloat16 numbers per lane."""
QUADS = Instruction("avx512vnni", Kernel(_multiply_quads_in_registers), 2 * 4 * LANES)
"""vpdpbusd: four products of 8-bit integers per lane."""
