"""AMX instructions. AMX has eight tiles, registers of up to 16 rows of up to 64 bytes.

`INSTRUCTIONS` builds the code of the instructions. No other part needs AMX, so tests on other processors
replace it by an emulation."""

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from llvmlite import ir

from tgis.shard.kernels.cpu.jit import llvm
from tgis.shard.kernels.cpu.jit.llvm import I8

TILE_ROWS, ROW_BYTES = 16, 64
ELEMENT_BYTES = 4  # of a float32 or int32 sum, a pair of bfloat16, or a quad of bytes
SHAPES_BYTES = 64  # size of the configuration, the shapes of all tiles
_FEATURES = ("amx-tile", "amx-bf16", "amx-int8")


class Tiles(Protocol):
    """Builder of AMX instructions. Tiles are numbered from 0. Strides are bytes between rows."""

    memory_bytes: ClassVar[int]
    """Size of `memory`, which begins with the configuration."""

    def __init__(self, b: Any, memory: Any): ...

    def configure(self) -> None:
        """Load the configuration at `memory` and clear all tiles."""

    def clear(self, tile: int) -> None: ...

    def load(self, tile: int, address: Any, stride: Any) -> None: ...

    def store(self, tile: int, address: Any, stride: Any) -> None: ...

    def add_pairs(self, sums: int, x: int, weights: int) -> None:
        """Add a product of bfloat16 values to float32 sums.

        According to Intel's manual, for each element one chain of fused multiply-adds, starting at 0, adds
        the products of the pairs' first values, and another chain those of the second values. The sum of both
        chains is then added. Every operation rounds to nearest even and flushes values below 2**-126."""

    def add_quads(self, sums: int, x: int, weights: int) -> None:
        """Add a product of signed (x) and unsigned (weights) bytes to int32 sums."""

    def add_signed_quads(self, sums: int, x: int, weights: int) -> None:
        """Add a product of signed bytes to int32 sums."""

    def release(self) -> None:
        """Reset the tiles, so that the system does not need to save them."""


@dataclass(frozen=True)
class ProcessorTiles:
    """`Tiles` by the processor's instructions."""

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

    def add_signed_quads(self, sums: int, x: int, weights: int) -> None:
        self._call("tdpbssd", I8(sums), I8(x), I8(weights))

    def release(self) -> None:
        self._call("tilerelease")

    def _call(self, name: str, *args: Any) -> None:
        llvm.call(self.b, f"llvm.x86.{name}", ir.VoidType(), *args)


INSTRUCTIONS: type[Tiles] | None = (
    ProcessorTiles if all(llvm.has_feature(name) for name in _FEATURES) else None
)
"""None if the processor or the system has no AMX."""
