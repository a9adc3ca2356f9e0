"""Sizes and addresses of a product, and copies of x in the layout that tiles read."""

from typing import Any, NamedTuple

from tgis.shard.kernels.cpu.gemm.inner_loop import BLOCK, STRIDE, copy, copy_columns
from tgis.shard.kernels.cpu.gemm.panels import PANEL
from tgis.shard.kernels.cpu.jit.compiler import operands, reorderable

LINE = 64  # bytes of a cache line
_ALIGNED = 16  # divisor of the columns of a block


class PanelKind(NamedTuple):
    """Kind of panels, constant in each kernel. Types are given by values."""

    width: int  # bytes of a row of a panel
    element: Any  # type of weights
    factor: Any  # type of x
    columns: int = 1  # columns of x per row of a panel
    is_widened: bool = True  # products of many rows convert weights to the type of x


class Product(NamedTuple):
    """Sizes and addresses of a product."""

    num_rows: int
    out_features: int
    in_features: int
    num_threads: int
    x: int
    weights: int
    y: int
    k: int  # rows of a panel
    columns: int  # of a block of x


class TileRows(NamedTuple):
    """Rows of x in the layout for tiles: blocks of columns, in which rows are STRIDE bytes apart."""

    address: Any
    block: Any  # bytes of a block


@reorderable
def divide_columns(k: int) -> int:
    """Return the columns of a block. Blocks have about equal sizes, because each prefetches as much as it
    reads, and begin at cache lines."""
    num_blocks = -(-k // BLOCK)
    return -(-k // (num_blocks * _ALIGNED)) * _ALIGNED


@reorderable
def copy_rows(w: Any, first: int, rows: int, to: Any, kind: Any) -> None:
    """Copy `rows` rows of x, beginning with `first`, in the form that tiles of `kind` read."""
    width = w.columns * kind.columns
    for r in range(rows):
        row = w.x + 4 * (first + r) * w.in_features
        for begin in range(0, w.in_features, width):
            place = to.address + begin // width * to.block + r * STRIDE
            count = min(width, w.in_features - begin)
            copy_columns(place, row + 4 * begin, count, kind.factor)


@reorderable
def describe_product(args: Any, kind: Any) -> Any:
    """Return the product that a kernel's arguments describe."""
    num_rows, out_features, in_features, num_threads, x, weights, y = operands(args, 1, 7)
    k = -(-in_features // kind.columns)
    return Product(num_rows, out_features, in_features, num_threads, x, weights, y, k, divide_columns(k))


@reorderable
def copy_last_panel(w: Any, sums: int, rows: int, y: int) -> None:
    """Copy sums of the last panel, [rows, PANEL] at an address, to the remaining columns of y."""
    column = (-(-w.out_features // PANEL) - 1) * PANEL
    for r in range(rows):
        copy(y + 4 * (r * w.out_features + column), sums + 4 * PANEL * r, 4 * (w.out_features - column))
