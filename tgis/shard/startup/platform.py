"""The platform of a shard, chosen once when it starts: a device, with its kernels, attention and memory.

Elsewhere, the kind of device decides only the backend of collectives, the allocation of the KV cache, and how
sampling searches for a limit."""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from tgis.errors import OperatorError
from tgis.pb import shard_pb2 as pb
from tgis.shard.adapters.registry import LoadedAdapters
from tgis.shard.collectives import ProcessGroup
from tgis.shard.layers.ops import Kernels
from tgis.shard.memory.kv_cache import KVCache
from tgis.shard.models.interface import Model
from tgis.shard.runner.graph_sizes import GraphSize
from tgis.shard.runner.interface import ModelRunner
from tgis.shard.runner.row_table import RowLimits
from tgis.shard.sampling.grammar import Guides

# From glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3

# Beginnings of the texts of torch's and Triton's errors of GPUs.
_GPU_ERRORS = ("CUDA error", "CUDA driver error", "Triton Error [CUDA]", "NCCL")


class DeviceError(OperatorError):
    """Error: the requested device does not exist, or cannot be used."""


class Memory(Protocol):
    """Memory that holds weights, cache and steps. All numbers are bytes."""

    def memory_left(self) -> int:
        """Return the memory that this process may still take."""

    def margin(self) -> int:
        """Return the memory that stays free when the cache is sized."""

    def release_memory(self) -> None:
        """Return freed memory to the system."""

    def memory_used(self) -> int: ...

    def begin_peak(self) -> int:
        """Start the measurement of `peak`. Return the memory that this process uses now."""

    def peak(self) -> int:
        """Return the most memory that this process has used since `begin_peak`."""


@dataclass(frozen=True)
class Compiler:
    """Compiler of a platform's kernels, which are compiled when they are first launched."""

    is_compiling: Callable[[], bool]
    """Return True while a kernel is being compiled. Any thread may ask."""
    finish: Callable[[], None]
    """Log what was compiled."""


@dataclass(frozen=True)
class RunnerParts:
    """Parts of a model runner, beside its platform."""

    model: Model
    cache: KVCache
    guides: Guides
    adapters: LoadedAdapters
    info: pb.InfoResponse
    limits: RowLimits
    max_rows: int
    can_capture: bool  # the model's steps may be captured


@dataclass(frozen=True)
class Platform:
    device: torch.device
    kernels: Kernels
    make_runner: Callable[["Platform", RunnerParts], ModelRunner]
    memory: Memory
    compiler: Compiler
    is_memory_shared: bool  # by all ranks of a machine
    cache_fraction: float  # share of the memory that weights and steps leave which the cache may take
    num_dummy_blocks: int = 0  # blocks of the cache beyond those that sequences have
    replaced_kernels: Sequence[str] = ()  # names of kernels whose twins compute
    product_dtype: torch.dtype | None = None
    """Type that products round their weights to; None: the weights' own."""
    cache_dtype: torch.dtype | None = None
    """Type of keys and values, unless the operator asks for another; None: the weights' own."""
    graph_sizes: Callable[[Sequence[int] | None, int, int], Sequence[GraphSize]] = lambda *_: ()
    """Returns the sizes of steps to capture, of the numbers of rows that the operator asked for, a maximum of
    rows, and a maximum of tokens of prompts."""

    def memory_left(self, group: ProcessGroup) -> int:
        """Return the bytes that the ranks of a machine may still take, on the machine with the least left.

        Raises ProcessGroupError."""
        left = group.min(self.memory.memory_left())
        return left if self.is_memory_shared else left * group.local_size


def is_gpu_failure(error: BaseException | None) -> bool:
    """Return True for an error of a GPU, after which the process can compute no more."""
    return isinstance(error, RuntimeError) and str(error).startswith(_GPU_ERRORS)


def configure_torch(num_threads: int) -> None:
    """Set the number of threads, and keep freed memory for the next step."""
    torch.set_num_threads(num_threads)
    # By default glibc maps every large buffer anew, and the page faults take ten times as long as filling it.
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        libc.mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)
