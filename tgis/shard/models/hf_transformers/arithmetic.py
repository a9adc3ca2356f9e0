"""Arithmetic of models: in float32 with this service's products on CPUs, in the weights' type with torch's on
GPUs. Attention is always this service's."""

from collections.abc import Set
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import nn

from tgis.shard.attention.interface import Attention
from tgis.shard.kernels.cpu.attention.attention import CpuAttention
from tgis.shard.layers.ops import Kernels
from tgis.shard.memory.kv_cache import CPU, KVCache
from tgis.shard.models.hf_transformers.packed_linear import pack_linears
from tgis.shard.models.hf_transformers.wide_head import widen_head


class Arithmetic(Protocol):
    @property
    def device(self) -> torch.device: ...
    @property
    def attention_dtype(self) -> torch.dtype:
        """Type of queries, keys and values that the attention receives."""

    @property
    def tolerance(self) -> float:
        """Maximum difference of two computations of a score, relative to the largest score."""

    @property
    def block_size(self) -> int:
        """Tokens per cache block in the check of scores."""

    def pack(self, whole: nn.Module, unpacked: Set[str]) -> None:
        """Replace linear layers of a model on the CPU, except those named in `unpacked`."""

    def widen(self, whole: nn.Module) -> None:
        """Make a model on `device` return scores of full precision."""

    def open_attention(self, cache: KVCache, group_size: int) -> Attention:
        """Return attention with up to `group_size` query heads per key/value head."""


@dataclass(frozen=True)
class HostArithmetic:
    dtype: torch.dtype
    """Type in which linear layers store their weights."""

    device: ClassVar = CPU
    attention_dtype: ClassVar = torch.float32
    tolerance: ClassVar = 2e-4  # reordered float32 arithmetic stays far below
    block_size: ClassVar = 4

    def pack(self, whole: nn.Module, unpacked: Set[str]) -> None:
        pack_linears(whole, self.dtype, unpacked)

    def widen(self, whole: nn.Module) -> None:
        """Do nothing, because all scores are float32."""

    def open_attention(self, cache: KVCache, group_size: int) -> Attention:
        return CpuAttention(cache)


@runtime_checkable
class AttendingKernels(Protocol):
    """Kernels of a device, with the attention that belongs to them."""

    @property
    def device(self) -> torch.device: ...
    def open_attention(self, cache: KVCache, group_size: int) -> Attention:
        """Return attention to a cache, in the weights' type, with up to `group_size` query heads per
        key/value head. The cache's last block is the dummy block."""


# Several times the rounding errors of a model with many layers; for float32, those of tensor cores.
_TOLERANCES = {torch.float32: 2e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}


@dataclass(frozen=True)
class DeviceArithmetic:
    dtype: torch.dtype
    kernels: AttendingKernels

    block_size: ClassVar = 16  # the default of the service, for which kernels are compiled anyway

    @property
    def device(self) -> torch.device:
        return self.kernels.device

    @property
    def attention_dtype(self) -> torch.dtype:
        return self.dtype

    @property
    def tolerance(self) -> float:
        return _TOLERANCES[self.dtype]

    def pack(self, whole: nn.Module, unpacked: Set[str]) -> None:
        """Do nothing, because torch computes the products."""

    def widen(self, whole: nn.Module) -> None:
        if self.dtype != torch.float32:
            widen_head(whole)

    def open_attention(self, cache: KVCache, group_size: int) -> Attention:
        return self.kernels.open_attention(cache, group_size)


def choose_arithmetic(kernels: Kernels, dtype: torch.dtype) -> Arithmetic:
    """Return the arithmetic of a platform with these kernels, for weights of type `dtype`."""
    if isinstance(kernels, AttendingKernels):
        return DeviceArithmetic(dtype, kernels)
    return HostArithmetic(dtype)
