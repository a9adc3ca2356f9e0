"""What a shard computes with: a device, and the kernels, attention and memory that go with it. Chosen once
when the shard starts; nothing else asks what kind of device it is, but the world, for how ranks talk."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from tgis.errors import OperatorError
from tgis.process.gpus import has_gpus
from tgis.shard.attention.interface import Attention
from tgis.shard.collectives import CPU, World
from tgis.shard.kernels.cpu import ops
from tgis.shard.kernels.cpu.attention.attention import CpuAttention
from tgis.shard.kernels.portable.attention import TorchAttention
from tgis.shard.kernels.portable.ops import TorchKernels
from tgis.shard.layers.ops import Kernels
from tgis.shard.memory import host_limits
from tgis.shard.memory.cuda import CudaMemory
from tgis.shard.memory.kv_cache import KVCache

logger = logging.getLogger(__name__)


class DeviceError(OperatorError):
    """There is no device as was asked for; the text is one line."""


class Memory(Protocol):
    """The memory that weights, cache and steps are in; all numbers are bytes."""

    def memory_left(self) -> int:
        """What this process may still take."""

    def release_memory(self) -> None:
        """Gives back what was freed, where it can be."""

    def memory_used(self) -> int:
        """What this process has taken."""

    def begin_peak(self) -> int:
        """What this process has taken; `peak` is counted from here on."""

    def peak(self) -> int:
        """The most that this process has had since `begin_peak`."""


@dataclass(frozen=True)
class Platform:
    device: torch.device
    kernels: Kernels
    attention: Callable[[KVCache], Attention]
    memory: Memory
    is_memory_shared: bool
    """Whether all ranks of a machine are in the same memory."""
    cache_divisor: int
    """Of the memory that weights and steps leave, the cache may have one part in so many."""
    tapes_steps: bool
    """Whether kernels and attention can be recorded."""

    def memory_left(self, ranks: World) -> int:
        """Bytes that all ranks of this machine together may still take, if each takes as many, on the
        machine that has the least left. Raises WorldError."""
        left = ranks.min(self.memory.memory_left())
        return left if self.is_memory_shared else left * ranks.local_size


ON_CPU = Platform(
    CPU, ops, CpuAttention, host_limits, is_memory_shared=True, cache_divisor=4, tapes_steps=True
)


def choose(asked: str, rank: int, size: int) -> Platform:
    """What rank `rank` of `size` on this machine computes with. Asked for is cpu, cuda or auto, which is GPUs
    where torch can compute on them. Raises DeviceError."""
    if asked == "cpu":
        return ON_CPU
    if not torch.cuda.is_available():
        if asked == "cuda":
            raise DeviceError("there is no GPU that torch can compute on; --device cpu asks for none")
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
    """`device` is this process's own."""
    kernels, memory = TorchKernels(device), CudaMemory(device)
    return Platform(device, kernels, TorchAttention, memory, False, cache_divisor=1, tapes_steps=False)
