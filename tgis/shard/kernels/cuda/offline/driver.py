"""Compiles kernels for GPUs that this machine does not have. Launches with tensors on the meta device use
Triton's just-in-time path and stop before the GPU would be used."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

KIB = 1 << 10
# Compute capability -> maximum shared memory per block.
MAX_SHARED_BYTES = {80: 163 * KIB, 86: 99 * KIB, 89: 99 * KIB, 90: 227 * KIB, 100: 227 * KIB, 120: 99 * KIB}
_MAX_THREADS = 1024
# Triton caches kernels by device number. Negative numbers belong to no GPU, and each context has its own.
_device_numbers = count(-1, -1)


@dataclass(frozen=True)
class OfflineKernel:
    """Variant of a kernel that a launch has loaded."""

    name: str
    types: dict[str, Any]  # argument -> type
    constants: dict[str, Any]  # constant argument -> value
    metadata: Any  # Triton's: shared, num_warps, num_stages, ...
    cubin: bytes


@contextmanager
def compile_only(
    capability: int, make_launcher: Callable[[Any, Any], object] | None = None
) -> Iterator[list[OfflineKernel]]:
    """Compile the kernels launched in the context for a compute capability (90: sm_90a) without running them.

    Yields the list of loaded kernels, each variant once. `make_launcher` is called with the source and
    metadata of each. A launch raises Triton's OutOfResources if a kernel needs more than the GPU has."""
    offline = _OfflineDriver(capability, make_launcher)
    before = _active_driver()
    driver.set_active(offline)
    try:
        yield offline.kernels
    finally:
        driver.set_active(before)


def _active_driver() -> Any:
    """Return Triton's driver, or None if there is no GPU that one is for."""
    try:
        return driver.active
    except RuntimeError:
        return None


class _OfflineDriver:
    """Driver for Triton that runs nothing. It has the methods that launches call."""

    def __init__(self, capability: int, make_launcher: Callable[[Any, Any], object] | None) -> None:
        self._capability = capability
        self._make_launcher = make_launcher
        self._device = next(_device_numbers)
        self._loading: tuple[Any, Any] | None = None  # source and metadata
        self.kernels: list[OfflineKernel] = []
        self.utils = self  # Triton calls utils.load_binary and utils.get_device_properties

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
