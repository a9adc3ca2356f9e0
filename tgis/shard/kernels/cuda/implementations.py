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
from tgis.shard.kernels.cuda.codes import multiply_codes, widen_codes
from tgis.shard.kernels.cuda.details import describe
from tgis.shard.kernels.cuda.few_rows import add_parts, multiply_few
from tgis.shard.kernels.cuda.functions import accept_drafts
from tgis.shard.kernels.cuda.grouped import add_low_rank, group_rows, mix_experts
from tgis.shard.kernels.cuda.grouped.group_rows import RowTiles
from tgis.shard.kernels.cuda.states import convolve, keep_inputs, scan_delta, scan_mamba

# Name of a kernel -> module with `launch` and `plain`.
KERNELS: dict[str, ModuleType] = {
    "begin_step": begin_step,
    "norm": norm,
    "turn_and_keep": turn_and_keep,
    "attend_segments": attend_segments,
    "attend_tiles": attend_tiles,
    "gate": gate,
    "multiply_few": multiply_few,
    "add_parts": add_parts,
    "sample": sample,
    "describe": describe,
    "accept_drafts": accept_drafts,
    "convolve": convolve,
    "scan_mamba": scan_mamba,
    "scan_delta": scan_delta,
    "keep_inputs": keep_inputs,
    "group_rows": group_rows,
    "add_low_rank": add_low_rank,
    "mix_experts": mix_experts,
    "multiply_codes": multiply_codes,
    "widen_codes": widen_codes,
}
STATE_KERNELS = frozenset({"convolve", "scan_mamba", "scan_delta", "keep_inputs"})
"""Kernels that only recurrent layers use."""
EXPERT_KERNELS = frozenset({"mix_experts"})
"""Kernels that only layers with experts use."""
CODE_KERNELS = frozenset({"multiply_codes", "widen_codes"})
"""Kernels that only weights of codes use."""


@dataclass(frozen=True)
class Implementations:
    """Implementation of each kernel. Signatures are those of `launch` in the modules of KERNELS."""

    begin_step: Callable[..., None]
    norm: Callable[..., Tensor]
    turn_and_keep: Callable[..., Tensor]
    attend_segments: Callable[..., Tensor]
    attend_tiles: Callable[..., None]
    gate: Callable[..., Tensor]
    multiply_few: Callable[..., Tensor]
    add_parts: Callable[..., Tensor]
    sample: Callable[..., None]
    describe: Callable[..., None]
    accept_drafts: Callable[..., None]
    convolve: Callable[..., Tensor]
    scan_mamba: Callable[..., Tensor]
    scan_delta: Callable[..., Tensor]
    keep_inputs: Callable[..., None]
    group_rows: Callable[..., RowTiles]
    add_low_rank: Callable[..., None]
    mix_experts: Callable[..., Tensor]
    multiply_codes: Callable[..., Tensor]
    widen_codes: Callable[..., Tensor]

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
