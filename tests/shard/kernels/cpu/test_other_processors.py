"""Products compiled for other processors, in child processes without cache: LLVM ends the process if a kernel
uses an unsupported instruction. Code for AVX2 also runs if this processor supports it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tgis.shard.kernels.cpu.jit.llvm import has_feature

V2 = "+sse3,+ssse3,+sse4.1,+sse4.2,+popcnt,+cx16"
V3 = f"{V2},+avx,+f16c,+avx2,+fma,+bmi,+bmi2,+lzcnt,+movbe"
V4 = f"{V3},+avx512f,+avx512bw,+avx512vl,+avx512dq,+avx512cd"
# LLVM's name of a processor -> features, instruction set of integer products, and lanes of vectors.
PROCESSORS = {
    "ivybridge": (f"{V2},+avx,+f16c", "_multiply_generic 8"),
    "haswell": (V3, "_multiply_avx2 8"),
    "alderlake": (f"{V3},+avxvnni", "_multiply_vnni 8"),
    "skylake-avx512": (V4, "_multiply_avx2 16"),
    "icelake-server": (f"{V4},+avx512vnni", "_multiply_vnni 16"),
}
KEEP_NOTHING = """
from tgis.shard.kernels.cpu.jit import cache
cache._bases = []
"""
# Tiles of one row compile faster and use the same instructions.
ONE_ROW = """
from tgis.shard.kernels.cpu.codes import inner_loop, many_rows
inner_loop.ROWS = many_rows.ROWS = many_rows.TALL = 1
"""
BUILD = """
import sys
from tgis.shard.kernels.cpu.codes import kernels as codes
from tgis.shard.kernels.cpu.codes.layout import Kind
from tgis.shard.kernels.cpu.codes.look_up import look_up
from tgis.shard.kernels.cpu.codes.packing import pack_codes
from tgis.shard.kernels.cpu.gemm import kernels as gemm
from tgis.shard.kernels.cpu.int8 import inner_loop, kernels as int8
kernels = {"codes": [*codes.MULTIPLY.values(), pack_codes, look_up], "gemm": [*gemm.MULTIPLY.values()]}
kernels["rounded"] = [codes.MULTIPLY[Kind(4, True)]] if codes.CAN_ROUND else []
kernels["int8"] = [int8.multiply_int8, int8.pack_codes]
for module in sys.argv[1:]:
    for kernel in kernels[module]:
        assert kernel.address
print(inner_loop.INSTRUCTION_SET.multiply.__name__, codes.LANES, codes.CAN_ROUND)
"""
RUN = """
import sys, pytest
sys.exit(pytest.main(["-q", "-n", "0", "-p", "no:cacheprovider", "-m", "not slow", *sys.argv[1:]]))
"""


def run(processor: str, program: str, *arguments: str) -> str:
    features, _ = PROCESSORS[processor]
    env = os.environ | {"NUMBA_CPU_NAME": processor, "NUMBA_CPU_FEATURES": features}
    command = [sys.executable, "-c", KEEP_NOTHING + program, *arguments]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.slow
def test_rounded_activations_compile_for_avx2() -> None:
    assert run("haswell", ONE_ROW + BUILD, "rounded").split() == ["_multiply_avx2", "8", "True"]


@pytest.mark.slow
@pytest.mark.parametrize("processor", PROCESSORS)
def test_products_compile(processor: str) -> None:
    actual = run(processor, BUILD, "codes", "int8", "gemm").split()
    chosen = PROCESSORS[processor][1].split()
    can_round = processor in ("haswell", "alderlake", "icelake-server")
    assert actual == [*chosen, str(can_round)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["test_codes.py", "test_gguf_codes.py", "test_int8.py"])
def test_values_with_avx2(name: str) -> None:
    if not (has_feature("avx2") and has_feature("fma")):
        pytest.skip("this processor has no AVX2")
    assert " passed" in run("haswell", RUN, str(Path(__file__).with_name(name)))
