"""Kernels for ARM processors. On other machines, QEMU emulates the processor, and the ordinary tests of
kernels pass with code that is compiled for it. That needs Debian's packages qemu-user, gcc-aarch64-linux-gnu
and libc6-dev-arm64-cross."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.shard.arm.emulator import MISSING, run_program
from tests.support.shard.arm.target import PROCESSORS
from tgis.shard.kernels.cpu.jit import arm
from tgis.shard.kernels.cpu.jit.llvm import architecture

HERE = Path(__file__).parent
emulated = pytest.mark.skipif(
    architecture() == "aarch64" or bool(MISSING),
    reason="this is an ARM machine, or it lacks qemu-user or gcc-aarch64-linux-gnu",
)
ATTENTION, CODES, FLOAT8 = "test_attention.py", "test_codes.py", "test_float8.py"
BF16_ATTENTION, GGUF, SEGMENTS = "test_bf16_attention.py", "test_gguf_codes.py", "test_segments.py"
GGUF_TYPES = ("Q4_K", "Q6_K", "Q8_0", "IQ4_XS")
# Compiling and emulation take minutes of processor time, and other tests run at the same time.
minutes = pytest.mark.timeout(1800)
# Names of tests, by the processor for which they are compiled.
TESTS = (
    ("neoverse-n1", ("test_int8.py", "test_kernel_graph.py", "test_bf16.py", "test_gemm.py")),
    ("neoverse-v2", ("pointwise", "test_lora.py", "../test_delta_net.py", "../test_mamba.py")),
    (
        "neoverse-v2",
        (f"{CODES}::test_sums_are_within_the_bound_of_their_roundings", f"{CODES}::test_rounded_activations"),
    ),
    (
        "neoverse-n1",
        (
            f"{ATTENTION}::test_equals_the_reference",
            f"{FLOAT8}::test_every_number_is_stored_as_torch_rounds_it",
            "test_int8_cache.py",
        ),
    ),
    ("neoverse-v2", (f"{ATTENTION}::test_scoring_options",)),
    (
        "neoverse-v2",
        (
            f"{BF16_ATTENTION}::test_equals_the_definition",
            f"{BF16_ATTENTION}::test_bits_do_not_depend_on_block_size_or_type_of_the_processor",
            f"{BF16_ATTENTION}::test_rounds_as_torch_does",
            f"{BF16_ATTENTION}::test_two_bits_fewer_are_noticed",
        ),
    ),
    (
        "neoverse-n1",
        (
            f"{SEGMENTS}::test_equals_the_definition[plain]",
            f"{SEGMENTS}::test_equals_the_definition[odd_sizes]",
            f"{SEGMENTS}::test_one_segment_has_the_bits_of_a_single_softmax",
            f"{SEGMENTS}::test_keys_outside_the_window_have_no_weight",
            f"{SEGMENTS}::test_cross_attention_reads_all_of_the_encoder",
        ),
    ),
    (
        "neoverse-n1",
        (
            f"{GGUF}::test_rows_are_the_package_s_numbers",
            *(f"{GGUF}::test_sums_are_within_the_bound_of_their_roundings[{name}]" for name in GGUF_TYPES),
            *(f"{GGUF}::test_rounded_activations[{name}]" for name in GGUF_TYPES[:2]),
        ),
    ),
)
# Reads the hardware capabilities as `arm` does, with the constants of the C library.
CAPABILITIES = """
#include <stdio.h>
#include <sys/auxv.h>
int main(void) { return printf("%d %lu", AT_HWCAP, getauxval(AT_HWCAP)) < 0; }
"""

# Runs a kernel, and checks the choices: 8-bit products use the dot product; bfloat16 would be emulated, so it
# is not the default.
START = """
import sys
from tests.support.shard.arm.run_tests import emulate_kernels
emulate_kernels(sys.argv[1])
import torch
from tgis.shard.kernels.cpu.amx import instructions
from tgis.shard.kernels.cpu.codes.integer_sums import CAN_ROUND
from tgis.shard.kernels.cpu.codes.layout import HAS_TABLES
from tgis.shard.kernels.cpu.int8.inner_loop import ARM_DOT, INSTRUCTION_SET
from tgis.shard.kernels.cpu.ops import CPU_KERNELS
from tgis.shard.startup.platforms.cpu import has_fast_bfloat16
x, y = torch.randn(5, 37), torch.randn(5, 37)
expected = x + y
assert CPU_KERNELS.add(x, y).equal(expected)
assert INSTRUCTION_SET is ARM_DOT
assert CAN_ROUND
assert HAS_TABLES
assert instructions.INSTRUCTIONS is None
assert not has_fast_bfloat16(may_use_amx=True)
"""
# Compiles all kernels. Tiles of products with codes have one row, which compiles faster and uses the same
# instructions.
COMPILE = """
import sys
from tests.support.shard.arm import target
target.use(sys.argv[1])
from tgis.shard.kernels.cpu.codes import inner_loop, many_rows
from tgis.shard.kernels.cpu.jit import cache
inner_loop.ROWS = many_rows.ROWS = many_rows.ROUNDED_ROWS = many_rows.TALL = 1
cache._bases[:] = []
from tgis.shard.kernels.cpu.precompile import all_kernels
kernels = all_kernels()
assert len(kernels) > 50
for kernel in kernels:
    assert kernel.address
"""


def run(*arguments: str) -> None:
    command = [sys.executable, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout


@emulated
@pytest.mark.parametrize(("model", "features"), [("cortex-a57", []), ("neoverse-n1", ["+dotprod"])])
def test_features_are_detected(model: str, features: list[str], tmp_path: Path) -> None:
    kind, capabilities = map(int, run_program(CAPABILITIES, model, tmp_path).split())
    assert kind == arm.AT_HWCAP
    assert arm.name_features(capabilities) == features


@emulated
def test_a_kernel_runs() -> None:
    run("-c", START, "neoverse-n1")


@emulated
@minutes
@pytest.mark.slow
@pytest.mark.parametrize("processor", PROCESSORS)
def test_kernels_compile(processor: str) -> None:
    run("-c", COMPILE, processor)


@emulated
@minutes
@pytest.mark.slow
@pytest.mark.parametrize(("processor", "names"), TESTS)
def test_numbers(processor: str, names: Sequence[str]) -> None:
    """Tests of kernels pass with code for ARM."""
    run("-m", "tests.support.shard.arm.run_tests", processor, *(str(HERE / name) for name in names))
