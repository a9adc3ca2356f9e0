"""Emulation of the AMX instructions in memory by plain LLVM operations, according to Intel's manual.

Where the processor would raise an exception because shapes do not match, sums become NaN or -1."""

import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar

import pytest
from llvmlite import ir

from tgis.shard.kernels.cpu.amx import instructions
from tgis.shard.kernels.cpu.jit import cache, llvm
from tgis.shard.kernels.cpu.jit.compiler import Kernel
from tgis.shard.kernels.cpu.jit.llvm import FLOAT, I1, I8, I16, I32, I64

_LANES, _ROW, _TILE, _NUM_TILES = 16, 64, 1024, 8
_WIDTHS_AT, _ROWS_AT, _TILES_AT = 16, 48, 64
_FLOATS, _INTEGERS = ir.VectorType(FLOAT, _LANES), ir.VectorType(I32, _LANES)


@dataclass(frozen=True)
class EmulatedTiles:
    """`Tiles` in memory, after the configuration."""

    b: Any
    memory: Any
    memory_bytes: ClassVar[int] = _TILES_AT + _NUM_TILES * _TILE

    def configure(self) -> None:
        for tile in range(_NUM_TILES):
            self.clear(tile)

    def clear(self, tile: int) -> None:
        self._run(_Operation.clear, I64(tile))

    def load(self, tile: int, address: Any, stride: Any) -> None:
        self._run(_Operation.load, I64(tile), address, stride)

    def store(self, tile: int, address: Any, stride: Any) -> None:
        self._run(_Operation.store, I64(tile), address, stride)

    def add_pairs(self, sums: int, x: int, weights: int) -> None:
        assert len({sums, x, weights}) == 3
        self._run(_Operation.add_pairs, I64(sums), I64(x), I64(weights))

    def add_quads(self, sums: int, x: int, weights: int) -> None:
        assert len({sums, x, weights}) == 3
        self._run(_Operation.add_quads, I64(sums), I64(x), I64(weights))

    def add_signed_quads(self, sums: int, x: int, weights: int) -> None:
        assert len({sums, x, weights}) == 3
        self._run(_Operation.add_signed_quads, I64(sums), I64(x), I64(weights))

    def release(self) -> None:
        """Remove the shapes of all tiles."""
        for offset in range(0, _TILES_AT, 8):
            self.b.store(I64(0), llvm.pointer_to(self.b, I64, self.memory, I64(offset)), align=1)

    def _run(self, build: Callable[..., None], *args: Any) -> None:
        """Call a function with the operation, because its code is long and the same for all tiles."""
        name, kind = f"emulated.{build.__name__}", ir.FunctionType(ir.VoidType(), [I64] * (1 + len(args)))
        if name not in self.b.module.globals:
            function = ir.Function(self.b.module, kind, name)
            function.linkage = "internal"
            for attribute in ("noinline", "optnone"):  # compiled often, run rarely
                function.attributes.add(attribute)
            b = ir.IRBuilder(function.append_basic_block())
            build(_Operation(b, function.args[0]), *function.args[1:])
            b.ret_void()
        self.b.call(self.b.module.globals[name], [self.memory, *args])


@dataclass(frozen=True)
class _Operation:
    """Builder of an operation's code. Tiles are 64-bit numbers."""

    b: Any
    memory: Any

    def clear(self, tile: Any) -> None:
        def clear_row(row: Any, _: list[Any]) -> list[Any]:
            self._store(llvm.constant(0, _LANES, I32), self._row(tile, row))
            return []

        llvm.loop(self.b, I64(_LANES), [], clear_row)

    def load(self, tile: Any, address: Any, stride: Any) -> None:
        self.clear(tile)
        self._copy(tile, address, stride, is_load=True)

    def store(self, tile: Any, address: Any, stride: Any) -> None:
        self._copy(tile, address, stride, is_load=False)

    def add_pairs(self, sums: Any, x: Any, weights: Any) -> None:
        b, zero = self.b, llvm.constant(0.0, _LANES)

        def add_row(row: Any, _: list[Any]) -> list[Any]:
            def add_pair(k: Any, chains: list[Any]) -> list[Any]:
                factor, pairs = self._element(x, row, k), self._load(self._row(weights, k))
                halves = zip(self._halves(factor), self._halves(pairs), chains, strict=True)
                return [self._flush(self._fma(*values)) for values in halves]

            chains = llvm.loop(b, self._height(weights), [zero, zero], add_pair)
            place = self._row(sums, row)
            total, both = self._flush(b.bitcast(self._load(place), _FLOATS)), self._flush(b.fadd(*chains))
            self._store_sums(self._flush(b.fadd(total, both)), place, sums, x, weights)
            return []

        llvm.loop(b, self._height(sums), [], add_row)

    def add_quads(self, sums: Any, x: Any, weights: Any) -> None:
        self._add_quads(sums, x, weights, self.b.lshr)

    def add_signed_quads(self, sums: Any, x: Any, weights: Any) -> None:
        self._add_quads(sums, x, weights, self.b.ashr)

    def _add_quads(self, sums: Any, x: Any, weights: Any, shift: Callable[[Any, Any], Any]) -> None:
        """Add products of signed bytes and those bytes of weights that `shift` extracts."""
        b, down = self.b, llvm.constant(24, _LANES, I32)

        def add_row(row: Any, _: list[Any]) -> list[Any]:
            def add_quad(k: Any, totals: list[Any]) -> list[Any]:
                [total], factor, codes = totals, self._element(x, row, k), self._load(self._row(weights, k))
                for i in range(4):
                    up = llvm.constant(24 - 8 * i, _LANES, I32)
                    values, weighted = b.ashr(b.shl(factor, up), down), shift(b.shl(codes, up), down)
                    total = b.add(total, b.mul(values, weighted))
                return [total]

            place = self._row(sums, row)
            [total] = llvm.loop(b, self._height(weights), [self._load(place)], add_quad)
            self._store_sums(total, place, sums, x, weights)
            return []

        llvm.loop(b, self._height(sums), [], add_row)

    def _copy(self, tile: Any, address: Any, stride: Any, is_load: bool) -> None:
        b = self.b
        count = b.udiv(self._width(tile), I64(4))

        def copy_row(row: Any, _: list[Any]) -> list[Any]:
            inside, outside = self._row(tile, row), b.add(address, b.mul(row, stride))
            source, to = (outside, inside) if is_load else (inside, outside)

            def copy_element(k: Any, _: list[Any]) -> list[Any]:
                offset = b.mul(k, I64(4))
                value = b.load(llvm.pointer_to(b, I32, source, offset), align=1)
                b.store(value, llvm.pointer_to(b, I32, to, offset), align=1)
                return []

            return llvm.loop(b, count, [], copy_element)

        llvm.loop(b, self._height(tile), [], copy_row)

    def _store_sums(self, value: Any, place: Any, sums: Any, x: Any, weights: Any) -> None:
        b = self.b
        pairs = (
            (self._height(sums), self._height(x)),
            (self._width(sums), self._width(weights)),
            (self._width(x), b.mul(self._height(weights), I64(4))),
        )
        fits = I1(1)
        for one, other in pairs:
            fits = b.and_(fits, b.icmp_signed("==", one, other))
        self._store(b.select(fits, b.bitcast(value, _INTEGERS), llvm.constant(-1, _LANES, I32)), place)

    def _halves(self, pairs: Any) -> list[Any]:
        b = self.b
        first = b.shl(pairs, llvm.constant(16, _LANES, I32))
        second = b.and_(pairs, llvm.constant(-(1 << 16), _LANES, I32))
        return [self._flush(b.bitcast(half, _FLOATS)) for half in (first, second)]

    def _flush(self, x: Any) -> Any:
        """Replace numbers below 2**-126 by zeros of the same sign."""
        b = self.b
        bits, zero = b.bitcast(x, _INTEGERS), llvm.constant(0, _LANES, I32)
        is_small = b.icmp_signed("==", b.and_(bits, llvm.constant(0x7F800000, _LANES, I32)), zero)
        sign = b.and_(bits, llvm.constant(-(1 << 31), _LANES, I32))
        return b.bitcast(b.select(is_small, sign, bits), _FLOATS)

    def _fma(self, x: Any, y: Any, z: Any) -> Any:
        return llvm.call(self.b, f"llvm.fma.v{_LANES}f32", _FLOATS, x, y, z)

    def _element(self, tile: Any, row: Any, k: Any) -> Any:
        place = llvm.pointer_to(self.b, I32, self._row(tile, row), self.b.mul(k, I64(4)))
        return llvm.broadcast(self.b, self.b.load(place, align=1), _LANES)

    def _row(self, tile: Any, row: Any) -> Any:
        begin = self.b.add(self.b.add(self.memory, I64(_TILES_AT)), self.b.mul(tile, I64(_TILE)))
        return self.b.add(begin, self.b.mul(row, I64(_ROW)))

    def _width(self, tile: Any) -> Any:
        place = self.b.add(I64(_WIDTHS_AT), self.b.mul(tile, I64(2)))
        return self._number(I16, place)

    def _height(self, tile: Any) -> Any:
        return self._number(I8, self.b.add(I64(_ROWS_AT), tile))

    def _number(self, kind: Any, offset: Any) -> Any:
        place = llvm.pointer_to(self.b, kind, self.memory, offset)
        return self.b.zext(self.b.load(place, align=1), I64)

    def _load(self, address: Any) -> Any:
        return self.b.load(llvm.pointer_to(self.b, _INTEGERS, address), align=1)

    def _store(self, value: Any, address: Any) -> None:
        self.b.store(value, llvm.pointer_to(self.b, _INTEGERS, address), align=1)


def compile_emulated(names: Sequence[str], kernel: str) -> Kernel:
    """Compile a kernel of the last of some modules, as `compile_each_emulated` does."""
    [compiled] = compile_each_emulated(names, lambda module: [getattr(module, kernel)])
    return compiled


def compile_each_emulated(
    names: Sequence[str], find: Callable[[ModuleType], Sequence[Kernel]]
) -> Sequence[Kernel]:
    """Compile kernels of the last of some modules below `tgis.shard.kernels.cpu`, which are imported again
    with emulated tiles. Their code is not stored on disk, where the processor's code would be expected."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "_bases", [])
        patch.setattr(instructions, "INSTRUCTIONS", EmulatedTiles)
        for name in names:
            module = _import_again(f"tgis.shard.kernels.cpu.{name}")
            patch.setitem(sys.modules, module.__name__, module)
            patch.setattr(sys.modules[module.__name__.rpartition(".")[0]], name.rpartition(".")[2], module)
        kernels = find(module)
        assert all(kernel.address for kernel in kernels)
    return kernels


def _import_again(name: str) -> ModuleType:
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
