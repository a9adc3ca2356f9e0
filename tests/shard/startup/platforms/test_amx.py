"""Check `--cpu-amx`: when AMX is requested, and an engine on emulated tiles."""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.shard.code_cases import Case, CodesInMemory, draw
from tests.support.shard.driver import check_company, configure
from tests.support.shard.emulated_tiles import compile_each_emulated
from tgis.shard.checkpoint.codes import CodeLayout
from tgis.shard.kernels.cpu.amx import instructions, permission
from tgis.shard.kernels.cpu.bf16 import tile_product
from tgis.shard.kernels.cpu.bf16.ops import BfloatKernels
from tgis.shard.kernels.cpu.bf16.tiles import TileProductKernels
from tgis.shard.kernels.cpu.codes.product import CodeProduct
from tgis.shard.kernels.cpu.codes.tiles import kernels as tiles
from tgis.shard.kernels.cpu.gemm import panels
from tgis.shard.quant.schemes import int4
from tgis.shard.startup.load import load
from tgis.shard.startup.platforms.cpu import ON_CPU
from tgis.shard.startup.prepare import prepare


@pytest.fixture(scope="module")
def model_path(checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint("grouped_queries")


@pytest.mark.parametrize(
    ("options", "is_asked"),
    [
        ({}, False),
        ({"quantize": "int8"}, True),
        ({"quantize": "int8", "cpu_amx": "off"}, False),
        ({"quantize": "int4"}, False),
        ({"quantize": "int4", "activations": "int8"}, True),
        ({"cpu_arithmetic": "bfloat16"}, True),
        ({"cpu_arithmetic": "bfloat16", "cpu_amx": "off"}, False),
    ],
)
def test_amx_is_asked_for_where_it_has_a_use(
    model_path: Path,
    options: dict[str, Any],
    is_asked: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Check that the log says that AMX is used, or that the system refuses it."""
    is_permitted = permission.ask() is None
    if is_permitted and instructions.INSTRUCTIONS is None:
        pytest.skip("kernels are compiled for a processor without AMX")
    if not is_permitted:
        monkeypatch.setattr(instructions, "INSTRUCTIONS", instructions.ProcessorTiles)
    with caplog.at_level(logging.INFO):
        plan = prepare(configure(model_path, **options))
    text = "use AMX tiles" if is_permitted else "does not permit the use of AMX"
    assert any(text in line for line in caplog.messages) == is_asked
    assert not plan.on.replaced_kernels


@pytest.mark.parametrize(
    ("options", "is_used"),
    [
        ({"activations": "int8"}, True),
        ({"activations": "int8", "cpu_arithmetic": "bfloat16"}, True),
        ({"activations": "int8", "cpu_amx": "off"}, False),
        ({"cpu_arithmetic": "bfloat16"}, False),
    ],
)
def test_products_with_rounded_activations_use_tiles(
    model_path: Path, options: dict[str, Any], is_used: bool
) -> None:
    if not tiles.KERNELS_ON_TILES or permission.ask() is not None:
        pytest.skip("there is no AMX, or the system does not permit it")
    packer = prepare(configure(model_path, quantize="int4", **options)).on.kernels.find_code_packer(
        int4.LAYOUT
    )
    assert packer is not None
    codes = draw(Case(CodeLayout(torch.int8, 4, 64), 64), 3)
    packed = packer(CodesInMemory(codes))
    assert isinstance(packed, CodeProduct)
    has_own = packed.tiles is not None and packed.tiles is tiles.KERNELS_ON_TILES.get(packed.kind)
    assert (has_own and packed.kind.rounds_activations) == is_used


@pytest.mark.slow
@pytest.mark.skipif(panels.PANEL != 32, reason="processors with AMX have AVX-512")
def test_an_engine_on_tiles_answers_the_same_alone_and_in_company(model_path: Path) -> None:
    names = ("amx.inner_loop", "bf16.tiles")
    emulated = TileProductKernels(*compile_each_emulated(names, lambda module: module.TILE_KERNELS))
    kernels = BfloatKernels(partial(tile_product.pack, kernels=emulated))
    on = replace(ON_CPU, kernels=kernels, product_dtype=torch.bfloat16)
    runner = load(configure(model_path, cpu_arithmetic="bfloat16", cpu_threads=2), on=on)
    check_company(runner)
