"""QK and PV products of attention on AMX tiles. A page of pairs of bfloat16 has the layout that AMX expects
of weights, so keys are read in place.

An instruction adds 32 channels (QK) or 32 keys (PV). The order of a sum depends neither on other rows nor on
other columns."""

from typing import Any

from tgis.shard.kernels.cpu.amx.inner_loop import open_tiles
from tgis.shard.kernels.cpu.amx.instructions import ROW_BYTES, TILE_ROWS
from tgis.shard.kernels.cpu.attention.qk_pv import GROUPS, SPAN
from tgis.shard.kernels.cpu.gemm import pairs
from tgis.shard.kernels.cpu.jit import llvm
from tgis.shard.kernels.cpu.jit.compiler import llvm_function
from tgis.shard.kernels.cpu.jit.llvm import I64
from tgis.shard.kernels.cpu.jit.vectors import LANES, load, multiply_add, prefer_512_bits, store

DEPTH = pairs.COLUMNS * TILE_ROWS  # channels or keys of an instruction
# Tiles 0 to 3 hold results, 4 holds rows, and 6 and 7 hold keys or values.
_ROWS = 4
_COLUMNS = (6, 7)
WIDE, NARROW = 4, 2  # tiles of results that one call of a PV product computes


@llvm_function()
def multiply_qk(
    b: Any, memory: Any, scores: Any, q: Any, q_stride: Any, places: Any, stride: Any, steps: Any
) -> None:
    """Compute scores[:TILE_ROWS, :SPAN] = q[:TILE_ROWS, : DEPTH * steps] @ keys[: DEPTH * steps, :SPAN].

    memory: address of the configuration. scores, q: addresses. places: address of GROUPS addresses of the
    keys' groups of LANES columns. q_stride, stride: bytes between rows of q and of pairs of keys."""
    tiles = open_tiles(b, memory)
    groups = [b.load(llvm.pointer_to(b, I64, places, I64(8 * group))) for group in range(GROUPS)]
    for group in range(GROUPS):
        tiles.clear(group)

    def add_channels(k: Any, _: list[Any]) -> list[Any]:
        tiles.load(_ROWS, b.add(q, b.mul(k, I64(ROW_BYTES))), q_stride)
        below = b.mul(k, b.mul(stride, I64(TILE_ROWS)))
        for group, base in enumerate(groups):
            keys = _COLUMNS[group % 2]
            tiles.load(keys, b.add(base, below), stride)
            tiles.add_pairs(group, _ROWS, keys)
        return []

    llvm.loop(b, steps, [], add_channels)
    for group in range(GROUPS):
        tiles.store(group, b.add(scores, I64(group * ROW_BYTES)), I64(4 * SPAN))


def _multiply_pv(width: int) -> Any:
    """Build a kernel function: out[:TILE_ROWS, : width * LANES] = weights[:TILE_ROWS, : DEPTH * steps] @
    values[: DEPTH * steps, : width * LANES].

    memory: address of the configuration. out, weights [TILE_ROWS, SPAN], values: addresses. stride: bytes
    between rows of out, and between rows of pairs of values."""

    @llvm_function()
    def multiply(b: Any, memory: Any, out: Any, weights: Any, values: Any, stride: Any, steps: Any) -> None:
        tiles = open_tiles(b, memory)
        for column in range(width):
            tiles.clear(column)

        def add_keys(k: Any, _: list[Any]) -> list[Any]:
            tiles.load(_ROWS, b.add(weights, b.mul(k, I64(ROW_BYTES))), I64(4 * SPAN))
            below = b.add(values, b.mul(k, b.mul(stride, I64(TILE_ROWS))))
            for column in range(width):
                chosen = _COLUMNS[column % 2]
                tiles.load(chosen, b.add(below, I64(column * ROW_BYTES)), stride)
                tiles.add_pairs(column, _ROWS, chosen)
            return []

        llvm.loop(b, steps, [], add_keys)
        for column in range(width):
            tiles.store(column, b.add(out, I64(column * ROW_BYTES)), stride)

    return multiply


multiply_pv_wide, multiply_pv_narrow = _multiply_pv(WIDE), _multiply_pv(NARROW)


@llvm_function()
def prefetch(b: Any, place: Any, stride: Any, head_dim: Any) -> None:
    """Prefetch the keys or values of a group. place: address of the group's address. stride: bytes between
    cache lines.

    The processor's own prefetching ends with each page of 4 KiB, and groups may be that far apart."""
    base = b.load(llvm.pointer_to(b, I64, place))

    def prefetch_line(k: Any, _: list[Any]) -> list[Any]:
        llvm.prefetch(b, base, b.mul(k, stride))
        return []

    llvm.loop(b, b.sdiv(head_dim, I64(pairs.COLUMNS)), [], prefetch_line)


@llvm_function()
def add_to_sums(b: Any, rows: Any, sums: Any, sums_stride: Any, factors: Any, out: Any, n: Any) -> None:
    """Compute sums[:rows, :n] = factors[:rows] * sums + out. `n` is a multiple of LANES.

    sums, factors, out [rows, n]: addresses. sums_stride: bytes between rows of sums."""
    prefer_512_bits(b)

    def add_row(r: Any, _: list[Any]) -> list[Any]:
        factor = llvm.load_broadcast(b, b.add(factors, b.mul(r, I64(4))), LANES)
        to = b.add(sums, b.mul(r, sums_stride))
        source = b.add(out, b.mul(r, b.mul(n, I64(4))))

        def add_vector(k: Any, _: list[Any]) -> list[Any]:
            offset = b.mul(k, I64(4 * LANES))
            store(b, multiply_add(b, load(b, to, offset), factor, load(b, source, offset)), to, offset)
            return []

        return llvm.loop(b, b.sdiv(n, I64(LANES)), [], add_vector)

    llvm.loop(b, rows, [], add_row)
