"""Kernels for ARM processors. On other machines, QEMU emulates the processor, and the ordinary tests of
kernels pass with code that is compiled for it. That needs Debian's packages qemu-user, gcc-aarch64-linux-gnu
and libc6-dev-arm64-cross."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.shard.arm.emulator import MISSING, run_program
from tgis.shard.kernels.cpu.amx import instructions
from tgis.shard.kernels.cpu.codes.integer_sums import CAN_ROUND
from tgis.shard.kernels.cpu.int8.inner_loop import ARM_DOT, INSTRUCTION_SET
from tgis.shard.kernels.cpu.jit import arm
from tgis.shard.kernels.cpu.jit.llvm import architecture, has_feature
from tgis.shard.startup.cpu_platform import has_fast_bfloat16

HERE = Path(__file__).parent
THIS = "test_arm.py::test_choices"
emulated = pytest.mark.skipif(
    architecture() == "aarch64" or bool(MISSING),
    reason="this is an ARM machine, or it lacks qemu-user or gcc-aarch64-linux-gnu",
)
# Names of tests, by the processor for which they are compiled.
TESTS = (
    ("neoverse-n1", ("test_int8.py", "test_kernel_graph.py", THIS)),
    ("neoverse-v2", ("pointwise", "test_float8.py", "../test_delta_net.py", "../test_mamba.py", THIS)),
)
# Reads the hardware capabilities as `arm` does, with the constants of the C library.
CAPABILITIES = """
#include <stdio.h>
#include <sys/auxv.h>
int main(void) { return printf("%d %lu", AT_HWCAP, getauxval(AT_HWCAP)) < 0; }
"""


ADD = """
import sys
from tests.support.shard.arm.run_tests import emulate_kernels
emulate_kernels(sys.argv[1])
import torch
from tgis.shard.kernels.cpu.ops import CPU_KERNELS
x, y = torch.randn(5, 37), torch.randn(5, 37)
expected = x + y
assert CPU_KERNELS.add(x, y).equal(expected)
"""
COMPILE = """
import sys
from tests.support.shard.arm import target
target.use(sys.argv[1])
from tgis.shard.kernels.cpu.jit import cache
from tgis.shard.kernels.cpu.precompile import all_kernels
cache._bases = []
kernels = all_kernels()
for kernel in kernels[int(sys.argv[2]) :: int(sys.argv[3])]:
    assert kernel.address
"""


def run(*arguments: str) -> None:
    command = [sys.executable, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.skipif(not has_feature("dotprod"), reason="this processor has no ARM dot product")
def test_choices() -> None:
    """8-bit products use the dot product. bfloat16 would be emulated, so it is not the default."""
    assert INSTRUCTION_SET is ARM_DOT
    assert CAN_ROUND
    assert instructions.INSTRUCTIONS is None
    assert not has_fast_bfloat16(may_use_amx=True)


@emulated
@pytest.mark.parametrize(("model", "features"), [("cortex-a57", []), ("neoverse-n1", ["+dotprod"])])
def test_features_are_detected(model: str, features: list[str], tmp_path: Path) -> None:
    kind, capabilities = map(int, run_program(CAPABILITIES, model, tmp_path).split())
    assert kind == arm.AT_HWCAP
    assert arm.name_features(capabilities) == features


@emulated
def test_a_kernel_runs() -> None:
    run("-c", ADD, "neoverse-n1")


@emulated
@pytest.mark.slow
@pytest.mark.parametrize(("processor", "names"), TESTS)
def test_numbers(processor: str, names: Sequence[str]) -> None:
    """Tests of kernels pass with code for ARM."""
    run("-m", "tests.support.shard.arm.run_tests", processor, *(str(HERE / name) for name in names))
