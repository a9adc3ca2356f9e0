"""LoRA adapters as the layers apply them: to every token of a step its own, or none."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

TILE = 16  # tokens that a kernel takes together: what it reads of an adapter serves so many


@dataclass(frozen=True)
class Cut:
    """This rank's part of a matrix [out_features, in_features] that an adapter may change."""

    shape: tuple[int, int]
    rows: tuple[slice, ...]  # in the order of the rank's own rows
    columns: slice | None = None  # None: all
    is_table: bool = False  # of embeddings: rows are looked up, out_features is the vocabulary


@dataclass(frozen=True, eq=False)
class LowRank:
    """What an adapter adds to some columns of a layer's output: y[first : first + width] += x a b.

    The scale is in `b`. For a table of embeddings x selects rows of `a`, which are tokens."""

    a: Tensor  # float32 [own in_features, rank], contiguous
    b: Tensor  # float32 [rank, width], contiguous
    first: int

    @cached_property
    def row(self) -> tuple[int, ...]:
        """Addresses of a and b, rank, first column, width."""
        return self.a.data_ptr(), self.b.data_ptr(), self.b.shape[0], self.first, self.b.shape[1]


@dataclass(frozen=True, eq=False)
class Adapter:
    """One rank's part of a LoRA adapter: what it adds to the outputs of layers, by their paths."""

    deltas: Mapping[str, tuple[LowRank, ...]]


@dataclass(frozen=True, eq=False)
class Deltas:
    """Of one layer: for each adapter of a step, what it adds; empty where it leaves the layer alone.

    The tensors beside `parts` are for kernels that follow addresses."""

    parts: tuple[tuple[LowRank, ...], ...]

    @cached_property
    def table(self) -> Tensor:
        """int64 [num_parts, 5]: their rows, adapter by adapter."""
        return torch.from_numpy(np.array([one.row for one in chain.from_iterable(self.parts)], np.int64))

    @cached_property
    def bounds(self) -> Tensor:
        """int64 [num_adapters + 1]: between which rows of the table an adapter's parts are."""
        return torch.from_numpy(np.array([0, *accumulate(map(len, self.parts))], np.int64))

    @cached_property
    def max_rank(self) -> int:
        return max((one.row[2] for one in chain.from_iterable(self.parts)), default=0)


class AdapterSet:
    """The adapters of a step; steps of the same ones share it, and what has been looked up in it."""

    def __init__(self, adapters: Sequence[Adapter]):
        self.adapters = tuple(adapters)
        self._deltas: dict[str, Deltas | None] = {}

    def at(self, path: str) -> Deltas | None:
        """None where no adapter changes the layer."""
        if path not in self._deltas:
            parts = tuple(adapter.deltas.get(path, ()) for adapter in self.adapters)
            self._deltas[path] = Deltas(parts) if any(parts) else None
        return self._deltas[path]


@dataclass(frozen=True)
class TokenAdapters:
    """Which adapter each token has."""

    adapters: AdapterSet
    indices: Tensor  # int32 [num_tokens], into the set; -1: none

    def at(self, path: str) -> Deltas | None:
        return self.adapters.at(path)

    def take(self, tokens: Tensor | slice) -> "TokenAdapters":
        """Of some of the tokens, in another order perhaps."""
        return TokenAdapters(self.adapters, self.indices[tokens])

    @cached_property
    def order(self) -> Tensor:
        """int64 [n]: the tokens that have an adapter, those of one adapter next to each other, ascending."""
        return torch.from_numpy(self._sorted[0]).to(self.indices.device)

    @cached_property
    def groups(self) -> tuple[tuple[int, Tensor], ...]:
        """The adapters that tokens have, each with its part of `order`."""
        return tuple((adapter, self.order[begin:end]) for adapter, begin, end in self._sorted[1])

    @cached_property
    def tiles(self) -> Tensor:
        """int64 [num_tiles, 3], on the CPU: some tokens of one adapter each. Its index; where in `order` the
        tokens begin, and how many they are, at most TILE."""
        rows = [
            (adapter, start, min(TILE, end - start))
            for adapter, begin, end in self._sorted[1]
            for start in range(begin, end, TILE)
        ]
        return torch.tensor(rows, dtype=torch.int64).view(-1, 3)

    @cached_property
    def _sorted(self) -> tuple[npt.NDArray[np.int64], list[tuple[int, int, int]]]:
        """`order`, and each adapter in it with its begin and end."""
        indices = self.indices.numpy(force=True)
        order = indices.argsort(kind="stable")
        order = order[np.count_nonzero(indices < 0) :]
        found, begins = np.unique(indices[order], return_index=True)
        bounds = pairwise([*begins.tolist(), len(order)])
        return order, [(i, begin, end) for i, (begin, end) in zip(found.tolist(), bounds, strict=True)]
