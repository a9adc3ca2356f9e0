"""Kernels that start before their predecessors end: what they do before they wait, read from their PTX."""

import re
from collections.abc import Iterator
from functools import cache

import pytest
import torch
import triton
from triton.runtime.jit import JITFunction

from tgis.shard.collectives import CPU
from tgis.shard.kernels.cuda import gate, norm, turn_and_keep
from tgis.shard.kernels.cuda.few_rows import add_parts, multiply_few
from tgis.shard.kernels.cuda.functions.dependent_launch import EARLY_KERNELS, is_dependent, refuse, stop
from tgis.shard.kernels.cuda.offline.driver import OfflineKernel, compile_only
from tgis.shard.kernels.cuda.offline.variants import Variant, find_variants

META = torch.device("meta")
KERNELS: dict[str, JITFunction] = {
    "multiply_few": multiply_few.multiply_few_kernel,
    "add_parts": add_parts.add_parts_kernel,
    "norm": norm._norm,
    "gate": gate._gate,
    "turn_and_keep": turn_and_keep._turn_and_keep,
}
# What a kernel does before it waits: read weights.
EARLY = {"multiply_few": {"prefetch.global"}, "norm": {"ld.global"}}
ACCESS = re.compile(r"(prefetch\.global|ld\.global|st\.global|cp\.async\.c[ag]|griddepcontrol\.\w+)")


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(tmp_path_factory.mktemp("triton"))
        yield
    refuse(None)


def find_variant(name: str) -> Variant:
    """Return a launch of a kernel, in parts if there are any."""
    found = [each for each in find_variants(3) if each.kernel == name and "bfloat16" in each.label.split()]
    return next((each for each in found if "parts" in each.label.split()), found[0])


def compile_one(name: str, capability: int) -> tuple[OfflineKernel, list[str]]:
    """Return a kernel, and its accesses to memory and waits in the order of its PTX."""
    before = set(KERNELS[name].device_caches)
    with compile_only(capability) as kernels:
        find_variant(name).run()
    [device] = set(KERNELS[name].device_caches) - before
    [compiled] = KERNELS[name].device_caches[device][0].values()
    return kernels[0], ACCESS.findall(compiled.asm["ptx"])


@cache
def compile_early(name: str) -> tuple[OfflineKernel, list[str]]:
    """Compile a kernel that starts early, once for all tests."""
    return compile_one(name, 90)


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_wait_before_they_access_results(name: str) -> None:
    kernel, accesses = compile_early(name)
    assert kernel.metadata.launch_pdl
    assert accesses.count("griddepcontrol.wait") == 1
    wait = accesses.index("griddepcontrol.wait")
    assert accesses[wait - 1] == "griddepcontrol.launch_dependents"
    assert set(accesses[: wait - 1]) == EARLY.get(name, set())
    assert {"st.global"} < set(accesses[wait:])


def test_these_are_the_kernels_that_start_early() -> None:
    """If the check of one fails, all are launched normally."""
    assert set(EARLY_KERNELS) == KERNELS.keys()


def test_weights_are_copied_asynchronously() -> None:
    _, accesses = compile_early("multiply_few")
    assert accesses.count("cp.async.cg") >= multiply_few.NUM_STAGES * 5, "four of weights and one of x a tile"
    assert "ld.global" not in accesses


@pytest.mark.parametrize("name", [pytest.param("multiply_few", marks=pytest.mark.slow), "add_parts"])
def test_older_gpus_start_kernels_one_by_one(name: str) -> None:
    kernel, accesses = compile_one(name, 80)
    assert not kernel.metadata.launch_pdl
    assert not [each for each in accesses if each.startswith(("griddepcontrol", "prefetch"))]


def test_kernels_start_one_by_one_after_a_refusal() -> None:
    refuse("of a test")
    kernel, accesses = compile_one("norm", 90)
    assert not kernel.metadata.launch_pdl
    assert "griddepcontrol.wait" not in accesses


def test_a_failed_capture_stops_early_starts() -> None:
    with compile_only(90):
        assert is_dependent(META)
        assert stop(META)
        assert not is_dependent(META)
        assert not stop(META)
        refuse(None)
        assert is_dependent(META)
    assert not is_dependent(CPU)
