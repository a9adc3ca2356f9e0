"""AMX instructions: eight tiles, registers of up to 16 rows of up to 64 bytes.

`INSTRUCTIONS` builds their code. It is the only part of the products that another processor cannot run, so
tests run everything else with an emulation in its place."""

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from llvmlite import ir

from tgis.shard.kernels.cpu.jit import llvm
from tgis.shard.kernels.cpu.jit.llvm import I8

TILE_ROWS, ROW_BYTES = 16, 64
ELEMENT_BYTES = 4  # of float32 and int32 sums, of a pair of bfloat16 numbers, of a quad of bytes
SHAPES_BYTES = 64  # of the configuration: the shapes of all tiles
_FEATURES = ("amx-tile", "amx-bf16", "amx-int8")


class Tiles(Protocol):
    """Builder of the code of AMX instructions. Tiles are numbered from 0; strides are bytes between rows."""

    memory_bytes: ClassVar[int]
    """Bytes that must be at `memory`; the first are the configuration."""

    def __init__(self, b: Any, memory: Any): ...

    def configure(self) -> None:
        """Take the shapes at `memory`, in the processor's format. Tiles become zeros."""

    def clear(self, tile: int) -> None: ...

    def load(self, tile: int, address: Any, stride: Any) -> None: ...

    def store(self, tile: int, address: Any, stride: Any) -> None: ...

    def add_pairs(self, sums: int, x: int, weights: int) -> None:
        """Add a product of bfloat16 numbers to float32 sums.

        By Intel's manual, each sum of a tile adds the pairs' first products in one chain of fused
        multiply-adds from 0 and their second ones in another, then both chains to each other, and that to the
        sum. It rounds to nearest even after each; numbers below 2**-126 are zeros."""

    def add_quads(self, sums: int, x: int, weights: int) -> None:
        """Add a product of signed bytes (x) and unsigned ones (weights) to int32 sums."""

    def release(self) -> None:
        """Return the tiles to their initial state, in which the system need not save them."""


@dataclass(frozen=True)
class ProcessorTiles:
    """`Tiles` of the processor."""

    b: Any
    memory: Any
    memory_bytes: ClassVar[int] = SHAPES_BYTES

    def configure(self) -> None:
        self._call("ldtilecfg", llvm.pointer_to(self.b, I8, self.memory))

    def clear(self, tile: int) -> None:
        self._call("tilezero", I8(tile))

    def load(self, tile: int, address: Any, stride: Any) -> None:
        self._call("tileloadd64", I8(tile), llvm.pointer_to(self.b, I8, address), stride)

    def store(self, tile: int, address: Any, stride: Any) -> None:
        self._call("tilestored64", I8(tile), llvm.pointer_to(self.b, I8, address), stride)

    def add_pairs(self, sums: int, x: int, weights: int) -> None:
        self._call("tdpbf16ps", I8(sums), I8(x), I8(weights))

    def add_quads(self, sums: int, x: int, weights: int) -> None:
        self._call("tdpbsud", I8(sums), I8(x), I8(weights))

    def release(self) -> None:
        self._call("tilerelease")

    def _call(self, name: str, *args: Any) -> None:
        llvm.call(self.b, f"llvm.x86.{name}", ir.VoidType(), *args)


INSTRUCTIONS: type[Tiles] | None = (
    ProcessorTiles if all(llvm.has_feature(name) for name in _FEATURES) else None
)
"""None if the processor or the system has no AMX."""
