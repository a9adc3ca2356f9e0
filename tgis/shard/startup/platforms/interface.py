"""Platform of a shard, chosen once at its start: a device with its kernels, attention and memory.

Other code depends on the kind of device only for the collectives' backend, the allocation of the KV cache,
and the threshold search in sampling."""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from tgis.errors import OperatorError
from tgis.shard.collectives import OpenLocal, ProcessGroup
from tgis.shard.layers.ops import Kernels
from tgis.shard.runner.graph_sizes import GraphSize
from tgis.shard.runner.interface import ModelRunner, RunnerParts

# From glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3

# Prefixes of the texts of torch's and Triton's GPU errors.
_GPU_ERRORS = ("CUDA error", "CUDA driver error", "Triton Error [CUDA]", "NCCL")


class DeviceError(OperatorError):
    """Error when the requested device does not exist or is unusable."""


class Memory(Protocol):
    """Memory for weights, cache and steps. All numbers are bytes."""

    def memory_left(self) -> int:
        """Return the memory that this process may still allocate."""

    def margin(self) -> int:
        """Return the memory that stays free when the cache is sized."""

    def release_memory(self) -> None:
        """Give freed memory back to the system."""

    def memory_used(self) -> int: ...

    def begin_peak(self) -> int:
        """Start the measurement of `peak`. Return the memory that this process uses now."""

    def peak(self) -> int:
        """Return the maximum memory that this process has used since `begin_peak`."""


@dataclass(frozen=True)
class KernelCompiler:
    """Compiler of a platform's kernels, which are compiled when they are first launched."""

    is_compiling: Callable[[], bool]
    """Function that returns True while a kernel is being compiled. Any thread may call it."""
    finish: Callable[[], None]
    """Function that logs the number of compiled kernels."""


@dataclass(frozen=True)
class Platform:
    device: torch.device
    kernels: Kernels
    make_runner: Callable[["Platform", RunnerParts], ModelRunner]
    memory: Memory
    compiler: KernelCompiler
    is_memory_shared: bool  # by all ranks of a machine
    cache_fraction: float  # fraction of the memory left by weights and steps that the cache may use
    num_dummy_blocks: int = 0  # cache blocks that no sequence uses, and as many states
    state_chunk: int = 0  # see `StateShape.chunk`
    replaced_kernels: Sequence[str] = ()  # names of kernels that are replaced by their fallbacks
    product_dtype: torch.dtype | None = None
    """Type to which matrix products round their weights; None: the weights' own type."""
    cache_dtype: torch.dtype | None = None
    """Type of the KV cache, unless the operator sets one; None: the weights' own type."""
    open_local: OpenLocal | None = None
    """Function that opens faster collectives of ranks that are on one machine."""
    find_rank_obstacle: Callable[[ProcessGroup], str | None] = lambda group: (
        "they use gloo" if group.local is None else None
    )
    """Function that returns why the collectives of several ranks cannot be part of captured steps; None if
    they can. All ranks call it at the same time. Raises ProcessGroupError."""
    graph_sizes: Callable[[Sequence[int] | None, int, int, bool], Sequence[GraphSize]] = lambda *_: ()
    """Function that returns the sizes of steps to capture. Its arguments are the configured numbers of rows,
    the maximum number of rows, the maximum number of prompt tokens, and whether LoRA adapters may be
    loaded."""

    choose_products: Callable[[Callable[[int], int]], None] = lambda _: None
    """Function that times products with the loaded matrices and uses the fastest. Its argument returns the
    smallest of the ranks' values."""

    def memory_left(self, group: ProcessGroup) -> int:
        """Return the bytes that the ranks of one machine may still allocate, on the machine with the least
        left.

        Raises ProcessGroupError."""
        left = group.min(self.memory.memory_left())
        return left if self.is_memory_shared else left * group.local_size


def is_gpu_failure(error: BaseException | None) -> bool:
    """Return True for a GPU error, after which the process cannot compute any more."""
    return isinstance(error, RuntimeError) and str(error).startswith(_GPU_ERRORS)


def configure_torch(num_threads: int) -> None:
    """Set the number of threads, and make the allocator keep freed memory for the next step."""
    torch.set_num_threads(num_threads)
    # By default, glibc maps every large buffer anew, and its page faults take ten times as long as filling
    # it.
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        libc.mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)
