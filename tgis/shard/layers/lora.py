"""LoRA adapters in the form that layers apply. Each token of a step has its own adapter, or none."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

LORA_TILE = 16  # most tokens that a kernel processes together, which saves reads of the adapter's weights


@dataclass(frozen=True)
class Cut:
    """Slices of a matrix [out_features, in_features] that are this rank's. Adapters may change the matrix."""

    shape: tuple[int, int]
    rows: tuple[slice, ...]  # in the order of the rank's own rows
    columns: slice | None = None  # None means all
    is_table: bool = False  # True for embeddings: rows are looked up, out_features is the vocabulary


@dataclass(frozen=True, eq=False)
class LowRank:
    """Low-rank update of some columns of a layer's output: y[first : first + width] += x a b. `b` includes
    the scale. For a table of embeddings, x selects rows of `a`, one for each token id."""

    a: Tensor  # float32 [own in_features, rank], contiguous
    b: Tensor  # float32 [rank, width], contiguous
    first: int

    @cached_property
    def row(self) -> tuple[int, ...]:
        """Addresses of `a` and `b`, the rank, the first column and the width."""
        return self.a.data_ptr(), self.b.data_ptr(), self.b.shape[0], self.first, self.b.shape[1]


@dataclass(frozen=True, eq=False)
class Adapter:
    """One rank's part of a LoRA adapter: the low-rank updates of layers, by their paths."""

    deltas: Mapping[str, tuple[LowRank, ...]]


@dataclass(frozen=True, eq=False)
class Deltas:
    """Low-rank updates of one layer, for each adapter of a step; empty for adapters that do not change it.
    `table` and `bounds` are for kernels that take addresses."""

    parts: tuple[tuple[LowRank, ...], ...]

    @cached_property
    def table(self) -> Tensor:
        """Table int64 [num_parts, 5]: `LowRank.row` of every part, adapter by adapter."""
        return torch.from_numpy(np.array([one.row for one in chain.from_iterable(self.parts)], np.int64))

    @cached_property
    def bounds(self) -> Tensor:
        """Bounds int64 [num_adapters + 1] of each adapter's rows in `table`."""
        return torch.from_numpy(np.array([0, *accumulate(map(len, self.parts))], np.int64))

    @cached_property
    def max_rank(self) -> int:
        return max((one.row[2] for one in chain.from_iterable(self.parts)), default=0)


class AdapterSet:
    """Adapters of a step. Steps with the same adapters share this object and its cached look-ups."""

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
    adapters: AdapterSet
    indices: Tensor  # int32 [num_tokens], indices into the set; -1 means none

    def at(self, path: str) -> Deltas | None:
        return self.adapters.at(path)

    def take(self, tokens: Tensor | slice) -> "TokenAdapters":
        """Return the adapters of some of the tokens, in any order."""
        return TokenAdapters(self.adapters, self.indices[tokens])

    @cached_property
    def order(self) -> Tensor:
        """Indices int64 [n] of the tokens that have an adapter, grouped by adapter and ascending."""
        return torch.from_numpy(self._sorted[0]).to(self.indices.device)

    @cached_property
    def groups(self) -> tuple[tuple[int, Tensor], ...]:
        """Indices of the adapters that tokens have, each with its part of `order`."""
        return tuple((adapter, self.order[begin:end]) for adapter, begin, end in self._sorted[1])

    @cached_property
    def tiles(self) -> Tensor:
        """Tiles int64 [num_tiles, 3], on the CPU. Each has tokens of one adapter: the adapter's index, the
        index in `order` of the first token, and the number of tokens, at most LORA_TILE."""
        rows = [
            (adapter, start, min(LORA_TILE, end - start))
            for adapter, begin, end in self._sorted[1]
            for start in range(begin, end, LORA_TILE)
        ]
        return torch.tensor(rows, dtype=torch.int64).view(-1, 3)

    @cached_property
    def _sorted(self) -> tuple[npt.NDArray[np.int64], list[tuple[int, int, int]]]:
        """Pair of `order` and, for each adapter in it, the adapter's index with its begin and end."""
        indices = self.indices.numpy(force=True)
        order = indices.argsort(kind="stable")
        order = order[np.count_nonzero(indices < 0) :]
        found, begins = np.unique(indices[order], return_index=True)
        bounds = pairwise([*begins.tolist(), len(order)])
        return order, [(i, begin, end) for i, (begin, end) in zip(found.tolist(), bounds, strict=True)]
