"""Launches on the meta device compile like real ones, for a GPU that the machine does not have."""

from collections.abc import Iterator

import pytest
import torch
import triton
from triton.runtime import driver
from triton.runtime.errors import OutOfResources

from tests.support.cuda.machine_code import read_machine_code, read_resources, read_target
from tests.support.cuda.toy_kernels import copy, multiply
from tgis.shard.kernels.cuda.offline.driver import MAX_SHARED_BYTES, compile_only

COPY, MULTIPLY = triton.jit(copy), triton.jit(multiply)


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(tmp_path_factory.mktemp("triton"))
        yield


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _multiply(m: int, n: int, k: int, **options: int) -> None:
    MULTIPLY[1,](_empty(m, k), _empty(k, n), _empty(m, n, dtype=torch.float32), m, n, k, **options)


@pytest.mark.slow
def test_variants_are_those_of_a_launch() -> None:
    x = _empty(4096)
    with compile_only(90) as kernels:
        COPY[4,](x, x, 4096, BLOCK=1024)
        COPY[2,](x, x, 2048, BLOCK=1024)
        assert len(kernels) == 1, "the same variant"
        COPY[4,](x[1:], x, 4095, BLOCK=1024)
        COPY[1,](x.float(), x, 1, BLOCK=1024)
    assert [kernel.name for kernel in kernels] == ["copy"] * 3
    assert [kernel.constants for kernel in kernels] == [{"BLOCK": 1024}] * 2 + [{"BLOCK": 1024, "n": 1}]
    assert [kernel.types["x"] for kernel in kernels] == ["*bf16", "*bf16", "*fp32"]
    aligned, unaligned = [read_machine_code(kernel) for kernel in kernels[:2]]
    assert (aligned.loads, aligned.wide_loads) == (1, 1)
    assert unaligned.wide_loads == 0 < unaligned.loads


@pytest.mark.parametrize("capability", [80, 89, 90, 100])
def test_code_is_for_the_capability(capability: int) -> None:
    before = driver._active
    with compile_only(capability) as kernels:
        COPY[1,](_empty(16), _empty(16), 16, BLOCK=16)
    assert kernels[0].metadata.target.arch == capability
    assert read_target(kernels[0]) == f"sm_{capability}{'a' * (capability >= 90)}"
    assert driver._active is before


def test_the_previous_driver_is_restored_after_an_error() -> None:
    before = driver._active
    with pytest.raises(ZeroDivisionError), compile_only(90):
        _ = 1 / 0
    assert driver._active is before


def test_products_use_tensor_cores() -> None:
    with compile_only(90) as kernels:
        _multiply(64, 64, 64)
        _multiply(16, 64, 64)
    wide, narrow = [read_machine_code(kernel) for kernel in kernels]
    assert wide.warpgroup_products > 0 == wide.tensor_products
    assert narrow.tensor_products > 0 == narrow.warpgroup_products
    assert wide.faults(MAX_SHARED_BYTES[90]) == []


def test_spilled_registers_are_found() -> None:
    with compile_only(80) as kernels:
        _multiply(64, 64, 64, maxnreg=32)
    code = read_resources(kernels[0])
    assert code.registers <= 32
    assert code.stack_bytes > 0
    assert code.faults(MAX_SHARED_BYTES[80]) == [f"{code.stack_bytes} bytes of registers are spilled"]


def test_a_gpu_with_less_shared_memory_refuses() -> None:
    with compile_only(90) as kernels:
        _multiply(128, 128, 256, num_warps=8)
    code = read_resources(kernels[0])
    assert MAX_SHARED_BYTES[89] < code.shared_bytes <= MAX_SHARED_BYTES[90]
    assert len(code.faults(MAX_SHARED_BYTES[89])) == 1
    with compile_only(89), pytest.raises(OutOfResources):
        _multiply(128, 128, 256, num_warps=8)
