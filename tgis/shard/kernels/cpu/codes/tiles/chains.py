"""Builder of the LLVM code of products of few rows with codes, with the bits of AMX tiles. Tiles are faster
only for more rows.

For every 32 columns of x, a tile adds the products of the first numbers of pairs in one chain of fused
multiply-adds, those of the second numbers in another, and then both to the sum."""

from typing import Any

from tgis.shard.kernels.cpu.codes.conversion import emit_numbers, load_table
from tgis.shard.kernels.cpu.codes.layout import COLUMNS, KINDS, UNIT, UNIT_BIT, VECTORS
from tgis.shard.kernels.cpu.codes.tiles.widening import find_pair_order, prefetch_unit
from tgis.shard.kernels.cpu.gemm.panels import LANES
from tgis.shard.kernels.cpu.jit import llvm
from tgis.shard.kernels.cpu.jit.compiler import llvm_function
from tgis.shard.kernels.cpu.jit.llvm import I64

FEW_ROWS = 2  # maximum rows; with more, the registers do not hold the chains


@llvm_function()
def multiply_few_rows(
    b: Any,
    rows: Any,
    cells: Any,
    x: Any,
    stride: Any,
    piece: Any,
    table: Any,
    units: Any,
    step_units: Any,
    ahead: Any,
    element: Any,
) -> None:
    """Compute cells[:rows, :COLUMNS] = x[:rows] @ the codes of a piece. Rows of x are float32, rounded to
    bfloat16, and `stride` bytes apart. A chain has the columns of `step_units` units. The code prefetches the
    same number of units at the address `ahead`."""
    if LANES != 16 or KINDS[element].rounds_activations:
        return  # no such processor has AMX, and few rounded rows are multiplied without tiles
    end = b.append_basic_block("end")
    cases = b.switch(rows, end)
    for num_rows in range(1, FEW_ROWS + 1):
        block = b.append_basic_block(f"rows{num_rows}")
        cases.add_case(I64(num_rows), block)
        b.position_at_end(block)
        places = [b.add(x, b.mul(stride, I64(r))) for r in range(num_rows)]
        sums = _add_steps(b, KINDS[element], table, places, piece, units, step_units, ahead)
        for i, total in enumerate(sums):
            r, v = divmod(i, VECTORS)
            llvm.store_vector(b, total, b.add(cells, I64(4 * (COLUMNS * r + LANES * v))))
        b.branch(end)
    b.position_at_end(end)


def _add_steps(
    b: Any, kind: Any, table: Any, rows: list[Any], piece: Any, units: Any, step_units: Any, ahead: Any
) -> list[Any]:
    """Emit the sums of rows and vectors of a panel."""
    numbers = load_table(b, kind, table)
    count = len(rows) * VECTORS
    zeros = [llvm.constant(0.0, LANES)] * count

    def add_step(step: Any, sums: list[Any]) -> list[Any]:
        first = b.mul(step, step_units)
        left = b.sub(units, first)
        num_units = b.select(b.icmp_signed("<", left, step_units), left, step_units)

        def add_unit(u: Any, chains: list[Any]) -> list[Any]:
            at = b.add(first, u)
            offset = b.mul(at, I64(UNIT_BIT * kind.bits))
            prefetch_unit(b, b.add(ahead, offset), kind)
            unit = b.add(piece, offset)
            sources = [b.add(row, b.mul(at, I64(4 * UNIT))) for row in rows]
            return _add_unit(b, kind, unit, sources, numbers, chains)

        chains = llvm.loop(b, num_units, zeros * 2, add_unit)
        both = [b.fadd(*pair) for pair in zip(chains[:count], chains[count:], strict=True)]
        return [b.fadd(*pair) for pair in zip(sums, both, strict=True)]

    steps = b.sdiv(b.add(units, b.sub(step_units, I64(1))), step_units)
    return llvm.loop(b, steps, zeros, add_step)


def _add_unit(
    b: Any, kind: Any, unit: Any, sources: list[Any], table: list[Any], chains: list[Any]
) -> list[Any]:
    """Emit the addition of a unit to the chains of the first numbers of pairs, followed by those of the
    second."""
    seconds = find_pair_order(kind.bits)[1::2]
    changed = list(chains)
    for k, first, vectors in emit_numbers(b, kind, unit, table, VECTORS):
        for r, source in enumerate(sources):
            factor = llvm.load_broadcast(b, b.add(source, I64(4 * k)), LANES)
            begin = (k in seconds) * len(chains) // 2 + r * VECTORS + first
            for i, vector in enumerate(vectors, begin):
                changed[i] = llvm.multiply_add(b, factor, vector, changed[i])
    return changed
