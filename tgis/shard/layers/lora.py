"""LoRA adapters as layers apply them. Each token of a step has at most one adapter."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, pairwise
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

LORA_TILE = 16  # maximum tokens per tile; the tokens of a tile share reads of the adapter's weights


@dataclass(frozen=True)
class Cut:
    """This rank's part of a matrix [out_features, in_features] that adapters may change."""

    shape: tuple[int, int]
    rows: tuple[slice, ...]  # in the order of the rank's own rows
    columns: slice | None = None  # None means all
    is_table: bool = False  # embedding: rows are looked up, and out_features is the vocabulary's size
    is_transposed: bool = False  # the layer multiplies by the transposed matrix
    module_height: int | None = None  # rows of the checkpoint's module, if the matrix is only a part of it


@dataclass(frozen=True, eq=False)
class LowRank:
    """Low-rank update of adjacent columns of a layer's output: y[:, first : first + width] += x a b. `b`
    includes the scale. For an embedding, token ids select rows of `a` instead of x a."""

    a: Tensor  # float32 [own in_features, rank], in the layout of `Kernels.place_low_rank`
    b: Tensor  # float32 [rank, width], contiguous
    first: int

    @cached_property
    def row(self) -> tuple[int, ...]:
        """Addresses of `a` and `b`, the rank, the first column and the width."""
        return self.a.data_ptr(), self.b.data_ptr(), self.b.shape[0], self.first, self.b.shape[1]


@dataclass(frozen=True, eq=False)
class Adapter:
    """This rank's part of a LoRA adapter: low-rank updates by the path of the layer."""

    deltas: Mapping[str, tuple[LowRank, ...]]


@dataclass(frozen=True, eq=False)
class Deltas:
    """Low-rank updates of one layer, per adapter of a step; empty if an adapter does not change the layer.
    `table` and `bounds` are for kernels whose operands are addresses."""

    parts: tuple[tuple[LowRank, ...], ...]

    @cached_property
    def table(self) -> Tensor:
        """`LowRank.row` of every update, ordered by adapter, int64 [num_parts, 5]."""
        return torch.from_numpy(np.array([one.row for one in chain.from_iterable(self.parts)], np.int64))

    @cached_property
    def bounds(self) -> Tensor:
        """Bounds of each adapter's rows in `table`, int64 [num_adapters + 1]."""
        return torch.from_numpy(np.array([0, *accumulate(map(len, self.parts))], np.int64))

    @cached_property
    def max_rank(self) -> int:
        return max((one.row[2] for one in chain.from_iterable(self.parts)), default=0)


class AdapterSource(Protocol):
    """Adapters of a step, which the tokens' indices refer to."""

    def at(self, path: str) -> Deltas | None:
        """Return the updates of a layer, or None if no adapter changes it."""


class AdapterSet:
    """Adapters of a step. Steps with the same adapters share this object, which caches look-ups."""

    def __init__(self, adapters: Sequence[Adapter]):
        self.adapters = tuple(adapters)
        self._deltas: dict[str, Deltas | None] = {}

    def at(self, path: str) -> Deltas | None:
        """Return the updates of a layer, or None if no adapter changes it."""
        if path not in self._deltas:
            parts = tuple(adapter.deltas.get(path, ()) for adapter in self.adapters)
            self._deltas[path] = Deltas(parts) if any(parts) else None
        return self._deltas[path]


@dataclass(frozen=True)
class TokenAdapters:
    adapters: AdapterSource
    indices: Tensor  # int32 [num_tokens], indices of the adapters; -1 means none

    def at(self, path: str) -> Deltas | None:
        return self.adapters.at(path)

    def take(self, tokens: Tensor | slice) -> "TokenAdapters":
        """Return the adapters of selected tokens."""
        return TokenAdapters(self.adapters, self.indices[tokens])

    @cached_property
    def order(self) -> Tensor:
        """Indices of the tokens that have an adapter, int64 [n], sorted by adapter, then by index."""
        return torch.from_numpy(self._sorted[0]).to(self.indices.device)

    @cached_property
    def groups(self) -> tuple[tuple[int, Tensor], ...]:
        """Index of each adapter in use, with its part of `order`."""
        return tuple((adapter, self.order[begin:end]) for adapter, begin, end in self._sorted[1])

    @cached_property
    def tiles(self) -> Tensor:
        """Tiles of tokens with one adapter, int64 [num_tiles, 3], on the CPU: the adapter's index, the index
        of the first token in `order`, and the number of tokens, at most LORA_TILE."""
        rows = [
            (adapter, start, min(LORA_TILE, end - start))
            for adapter, begin, end in self._sorted[1]
            for start in range(begin, end, LORA_TILE)
        ]
        return torch.tensor(rows, dtype=torch.int64).view(-1, 3)

    @cached_property
    def _sorted(self) -> tuple[npt.NDArray[np.int64], list[tuple[int, int, int]]]:
        """`order`, and each adapter's index with the begin and end of its part of `order`."""
        indices = self.indices.numpy(force=True)
        order = indices.argsort(kind="stable")
        order = order[np.count_nonzero(indices < 0) :]
        in_use, begins = np.unique(indices[order], return_index=True)
        bounds = pairwise([*begins.tolist(), len(order)])
        return order, [(i, begin, end) for i, (begin, end) in zip(in_use.tolist(), bounds, strict=True)]
