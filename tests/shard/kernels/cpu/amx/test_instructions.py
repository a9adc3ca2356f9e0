"""Parts of AMX that every machine can test: shapes of tiles by the rules of Intel's manual, the system's
permission, and code compiled for a processor with AMX, which is not run."""

import ctypes
import os
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llvmlite import binding

from tgis.shard.kernels.cpu.amx import instructions, permission
from tgis.shard.kernels.cpu.amx.inner_loop import write_shapes
from tgis.shard.kernels.cpu.jit.compiler import Kernel, operands

BUILD = """
import sys
from pathlib import Path
from tgis.shard.kernels.cpu.jit import cache
cache._BESIDE_SOURCE = Path(sys.argv[1]) / "kept"
cache._bases = [cache._BESIDE_SOURCE]
from tgis.shard.kernels.cpu.bf16.tiles import TILE_KERNELS
from tgis.shard.kernels.cpu.int8.kernels import MULTIPLY_INT8_TILES
for name, kernel in (("bf16", TILE_KERNELS and TILE_KERNELS.multiply), ("int8", MULTIPLY_INT8_TILES)):
    (Path(sys.argv[1]) / name).write_text(kernel._compiled._library.get_asm_str())
"""
FEATURES = ("amx-tile", "amx-bf16", "amx-int8", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vnni")


def _write_shapes(args: Any) -> None:
    address, rows, depth = operands(args, 1, 3)
    write_shapes(address, rows, depth)


WRITE_SHAPES = Kernel(_write_shapes)


def read_shapes(rows: int, depth: int) -> tuple[list[int], list[int]]:
    memory = np.full(64, 0xEE, np.uint8)
    WRITE_SHAPES(memory.ctypes.data, rows, depth)
    palette, start_row, reserved, *numbers = struct.unpack("<BB14s16H16B", memory.tobytes())
    assert (palette, start_row, reserved) == (1, 0, bytes(14))
    widths, heights = numbers[:16], numbers[16:]
    assert not any(widths[8:] + heights[8:]), "palette 1 has eight tiles"
    return widths[:8], heights[:8]


def test_shapes_are_valid_for_instructions() -> None:
    """The processor raises an exception for all other shapes."""
    for rows in range(1, 33):
        for depth in range(1, 17):
            widths, heights = read_shapes(rows, depth)
            assert all(width <= 64 and height <= 16 for width, height in zip(widths, heights, strict=True))
            for half, height in enumerate((min(rows, 16), max(0, rows - 16))):
                tiles = [2 * half, 2 * half + 1, 4 + half]
                assert [heights[tile] for tile in tiles] == [height] * 3
                if height == 0:
                    assert not any(widths[tile] for tile in tiles), "a tile without rows has no columns"
                    continue
                for sums, weights in zip(tiles[:2], (6, 7), strict=True):
                    assert widths[sums] == widths[weights] == 64
                    assert widths[4 + half] == 4 * heights[weights] == 4 * depth


def test_permission_is_the_systems() -> None:
    supported = ctypes.c_uint64()
    get_supported = 0x1021  # ARCH_GET_XCOMP_SUPP: the supported features
    assert ctypes.CDLL(None).syscall(158, get_supported, ctypes.byref(supported)) == 0
    refused = permission.ask()
    assert (refused is None) == bool(supported.value >> 18 & 1), refused


def test_a_refusal_is_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    if permission.ask() is None:
        pytest.skip("the system permits AMX")
    monkeypatch.setattr(instructions, "INSTRUCTIONS", instructions.ProcessorTiles)
    assert not permission.may_use_tiles()
    [line] = caplog.messages
    assert re.fullmatch(r"the system does not permit the use of AMX, so it is not used: E\w+, .+", line)
    monkeypatch.setattr(instructions, "INSTRUCTIONS", None)
    assert not permission.may_use_tiles()
    assert len(caplog.messages) == 1, "without AMX, permission is not requested"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of the assembly of both kernels, compiled for Sapphire Rapids."""
    directory = tmp_path_factory.mktemp("built")
    features = binding.get_host_cpu_features()
    features.update(dict.fromkeys(FEATURES, True))
    environ = {"NUMBA_CPU_NAME": "sapphirerapids", "NUMBA_CPU_FEATURES": features.flatten()}
    command = [sys.executable, "-c", BUILD, str(directory)]
    subprocess.run(command, env={**os.environ, **environ}, check=True)
    return directory


@pytest.mark.slow
@pytest.mark.parametrize(("name", "product"), [("bf16", "tdpbf16ps"), ("int8", "tdpbsud")])
def test_code_for_the_processor(built: Path, name: str, product: str) -> None:
    lines = (built / name).read_text().splitlines()
    code = [line.split(None, 1) for line in lines if line.startswith(("\ttile", "\ttdp", "\tldtile"))]
    used = {words[0] for words in code}
    assert used == {"ldtilecfg", "tilezero", "tileloadd", "tilestored", "tilerelease", product}
    function = {"bf16": "tiles._multiply_tiles", "int8": "kernels._multiply_int8_tiles"}[name]
    assert len(list(built.glob(f"kept/**/{function}-*.nbc"))) == 1, "later starts use the cache"
    # Operands are weights, x and sums. x is in tile 4 or 5, weights are in tile 6 or 7.
    for words in code:
        if words[0] == product:
            weights, x, sums = (int(number) for number in re.findall(r"%tmm(\d)", words[1]))
            assert sums == 2 * (x - 4) + weights - 6
    # Spilled tiles would add stores; a product stores its 2 or 4 sums once. Those that prefetch share stores.
    stores = [int(re.findall(r"%tmm(\d)", words[1])[0]) for words in code if words[0] == "tilestored"]
    assert set(stores) == {0, 1, 2, 3}
    calls = stores.count(2)
    assert sorted(stores) == sorted([0, 1, 0, 1, 2, 3] * calls)
    # Products of one or two tiles of rows, and those that prefetch, may share the code that clears a tile.
    cleared = [int(re.findall(r"%tmm(\d)", words[1])[0]) for words in code if words[0] == "tilezero"]
    assert set(cleared) == {0, 1, 2, 3}
    assert len(cleared) <= (2 + 4 + 4) * calls
