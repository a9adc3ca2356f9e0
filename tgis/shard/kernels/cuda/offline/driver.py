"""Compiles kernels for GPUs that this machine lacks. Launches with tensors on the meta device go through
Triton's just-in-time path, and end where the GPU would begin."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

KIB = 1 << 10
# Shared memory of a block, by compute capability.
MAX_SHARED_BYTES = {80: 163 * KIB, 86: 99 * KIB, 89: 99 * KIB, 90: 227 * KIB, 100: 227 * KIB, 120: 99 * KIB}
_MAX_THREADS = 1024
# Triton keeps kernels by the number of their device. These are no GPU's, and each is one context's.
_device_numbers = count(-1, -1)


@dataclass(frozen=True)
class OfflineKernel:
    """One variant of a kernel, as a launch has loaded it."""

    name: str
    types: dict[str, Any]  # of arguments, by name
    constants: dict[str, Any]  # values of arguments that are compiled in, by name
    metadata: Any  # Triton's: shared, num_warps, num_stages, ...
    cubin: bytes


@contextmanager
def compile_only(
    capability: int, make_launcher: Callable[[Any, Any], object] | None = None
) -> Iterator[list[OfflineKernel]]:
    """Compile what is launched in the context for a compute capability, 90 for sm_90a, and run nothing.

    Yields the list of kernels that launches in this context have loaded, each variant once. `make_launcher`
    is called with the source and metadata of each. A launch raises Triton's OutOfResources for a kernel that
    needs more than the GPU has."""
    offline = _OfflineDriver(capability, make_launcher)
    before = driver._active
    driver.set_active(offline)
    try:
        yield offline.kernels
    finally:
        driver.set_active(before)


class _OfflineDriver:
    """Triton's driver of a GPU that runs nothing. Its methods are those that Triton's launches call."""

    def __init__(self, capability: int, make_launcher: Callable[[Any, Any], object] | None) -> None:
        self._capability = capability
        self._make_launcher = make_launcher
        self._device = next(_device_numbers)
        self._loading: tuple[Any, Any] | None = None  # source and metadata
        self.kernels: list[OfflineKernel] = []
        self.utils = self  # Triton calls `load_binary` and `get_device_properties` of it

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        if self._make_launcher is not None:
            self._make_launcher(source, metadata)
        self._loading = source, metadata
        return lambda *args: None

    def load_binary(self, name: str, cubin: bytes, shared: int, device: int) -> tuple[int, ...]:
        assert self._loading is not None, "a binary is loaded after its launcher"
        source, metadata = self._loading
        names = source.fn.arg_names
        constants = {names[path[0]]: value for path, value in source.constants.items() if len(path) == 1}
        self.kernels.append(OfflineKernel(name, dict(source.signature), constants, metadata, cubin))
        return 0, 0, 0, 0, _MAX_THREADS  # module, function, registers, spills, threads

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": MAX_SHARED_BYTES[self._capability]}

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return self._device

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        pass

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")
