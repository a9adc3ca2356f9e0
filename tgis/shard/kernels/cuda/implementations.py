"""Selected implementation of each kernel: Triton's, or its twin in torch operators."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from types import ModuleType
from typing import Self

from torch import Tensor

from tgis.shard.kernels.cuda import (
    attend_segments,
    attend_tiles,
    begin_step,
    gate,
    norm,
    sample,
    turn_and_keep,
)
from tgis.shard.kernels.cuda.details import describe
from tgis.shard.kernels.cuda.functions import accept_drafts
from tgis.shard.kernels.cuda.states import convolve, keep_inputs, scan_delta, scan_mamba

# Name of a kernel -> module with `launch` and `plain`.
KERNELS: dict[str, ModuleType] = {
    "begin_step": begin_step,
    "norm": norm,
    "turn_and_keep": turn_and_keep,
    "attend_segments": attend_segments,
    "attend_tiles": attend_tiles,
    "gate": gate,
    "sample": sample,
    "describe": describe,
    "accept_drafts": accept_drafts,
    "convolve": convolve,
    "scan_mamba": scan_mamba,
    "scan_delta": scan_delta,
    "keep_inputs": keep_inputs,
}
STATE_KERNELS = frozenset({"convolve", "scan_mamba", "scan_delta", "keep_inputs"})
"""Kernels that only recurrent layers use."""


@dataclass(frozen=True)
class Implementations:
    """Implementation of each kernel. Signatures are those of `launch` in the modules of KERNELS."""

    begin_step: Callable[..., None]
    norm: Callable[..., Tensor]
    turn_and_keep: Callable[..., Tensor]
    attend_segments: Callable[..., Tensor]
    attend_tiles: Callable[..., None]
    gate: Callable[..., Tensor]
    sample: Callable[..., None]
    describe: Callable[..., None]
    accept_drafts: Callable[..., None]
    convolve: Callable[..., Tensor]
    scan_mamba: Callable[..., Tensor]
    scan_delta: Callable[..., Tensor]
    keep_inputs: Callable[..., None]

    @classmethod
    def choose(cls, replaced: frozenset[str] = frozenset()) -> Self:
        """Choose Triton's kernels, except for those `replaced` by their twins."""
        names = [each.name for each in fields(cls)]
        assert replaced <= set(names), "unknown kernel"
        return cls(
            **{name: KERNELS[name].plain if name in replaced else KERNELS[name].launch for name in names}
        )

    @classmethod
    def plain(cls) -> Self:
        return cls.choose(frozenset(KERNELS))

    @property
    def replaced(self) -> list[str]:
        """Names of kernels that are replaced by their twins."""
        return [name for name, module in KERNELS.items() if getattr(self, name) is module.plain]
