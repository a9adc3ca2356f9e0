"""The platform of a shard, chosen once when it starts: a device, with its kernels, attention and memory.

Elsewhere, the kind of device decides only the backend of collectives, the allocation of the KV cache, and how
sampling searches for a limit."""

import ctypes
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from tgis.errors import OperatorError
from tgis.process.gpus import has_gpus
from tgis.shard.attention.interface import Attention
from tgis.shard.collectives import CPU, ProcessGroup
from tgis.shard.kernels.cpu.attention.attention import CpuAttention
from tgis.shard.kernels.cpu.ops import CPU_KERNELS
from tgis.shard.kernels.portable.attention import TorchAttention
from tgis.shard.kernels.portable.ops import TorchKernels
from tgis.shard.layers.ops import Kernels
from tgis.shard.memory.cuda import CudaMemory
from tgis.shard.memory.host_limits import HostMemory
from tgis.shard.memory.kv_cache import KVCache

logger = logging.getLogger(__name__)

# From glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


class DeviceError(OperatorError):
    """Error: the requested device does not exist."""


class Memory(Protocol):
    """Memory that holds weights, cache and steps. All numbers are bytes."""

    def memory_left(self) -> int:
        """Return the memory that this process may still take."""

    def release_memory(self) -> None:
        """Return freed memory to the system."""

    def memory_used(self) -> int: ...

    def begin_peak(self) -> int:
        """Start the measurement of `peak`. Return the memory that this process uses now."""

    def peak(self) -> int:
        """Return the most memory that this process has used since `begin_peak`."""


@dataclass(frozen=True)
class Platform:
    device: torch.device
    kernels: Kernels
    attention: Callable[[KVCache], Attention]
    memory: Memory
    is_memory_shared: bool  # by all ranks of a machine
    cache_divisor: int  # the cache may have one part in so many of the memory that weights and steps leave
    captures_steps: bool  # the launches of kernels and attention can be captured and replayed

    def memory_left(self, group: ProcessGroup) -> int:
        """Return the bytes that the ranks of a machine may still take, on the machine with the least left.

        Raises ProcessGroupError."""
        left = group.min(self.memory.memory_left())
        return left if self.is_memory_shared else left * group.local_size


ON_CPU = Platform(
    CPU, CPU_KERNELS, CpuAttention, HostMemory(), is_memory_shared=True, cache_divisor=4, captures_steps=True
)


def choose(asked: str, rank: int, size: int) -> Platform:
    """Choose the platform of rank `rank` of the `size` ranks on this machine.

    `asked` is cpu, cuda or auto; auto means GPUs if torch can compute on them. Raises DeviceError."""
    if asked == "cpu":
        return ON_CPU
    if not torch.cuda.is_available():
        if asked == "cuda":
            raise DeviceError("there is no GPU that torch can compute on; --device cpu needs none")
        if has_gpus(None):
            logger.warning("there are GPUs, but torch cannot compute on them: computing on the CPU")
        return ON_CPU
    count = torch.cuda.device_count()
    if size > count:
        raise DeviceError(f"{size} shards configured but only {count} GPUs detected")
    device = torch.device("cuda", rank % count)
    torch.cuda.set_device(device)
    return on_cuda(device)


def on_cuda(device: torch.device) -> Platform:
    kernels, memory = TorchKernels(device), CudaMemory(device)
    return Platform(device, kernels, TorchAttention, memory, False, cache_divisor=1, captures_steps=False)


def configure_torch(num_threads: int) -> None:
    """Set the number of threads, and keep freed memory for the next step."""
    torch.set_num_threads(num_threads)
    # By default glibc maps every large buffer anew, and the page faults take ten times as long as filling it.
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        libc.mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)
