"""Table of LoRA adapters in GPU memory. Each adapter that rows use has a slot, whose entries have the
addresses of its matrices. Captured steps read the table, so adapters may come and go."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tgis.shard.kernels.cuda.grouped.group_rows import RowTiles
from tgis.shard.layers.lora import Adapter, Deltas, TokenAdapters

# int64 words of an entry: the addresses of a and b, the rank, the first column, the width, and an unused one,
# which makes the bytes of a slot a multiple of 16. Entries that are not used have rank 0.
ENTRY = 6
# Maximum rank of adapters in captured steps: it determines the memory for the products with a.
MAX_RANK = 256
MAX_ALIGNMENT = 16  # of first columns and widths, as far as a kernel can use it
TILE = 32  # maximum tokens of a tile; they share reads of an adapter's matrices

GroupRows = Callable[[Tensor, int, int], RowTiles]


@dataclass(frozen=True)
class TermBounds:
    """Low-rank updates that an adapter may have at a layer."""

    count: int  # maximum
    alignment: int  # number that divides the first columns and widths of all updates


@dataclass(frozen=True, eq=False)
class SlotDeltas(Deltas):
    """Low-rank updates of one layer for every slot."""

    path: str
    slots: "AdapterSlots"
    entries: Tensor  # int64 [num_slots, num_terms, ENTRY], with the slots' stride
    alignment: int


@dataclass(frozen=True, eq=False)
class AdapterSlots:
    """Slots of adapters, and the layers that they may change, by path. `held` has the adapter of each
    slot."""

    layers: Mapping[str, TermBounds]
    memory: Tensor  # int64 [num_slots, number of all terms * ENTRY]
    held: list[Adapter | None] = field(default_factory=list)

    @classmethod
    def allocate(
        cls, layers: Mapping[str, TermBounds], num_slots: int, device: torch.device
    ) -> "AdapterSlots":
        width = ENTRY * sum(bounds.count for bounds in layers.values())
        memory = torch.zeros((num_slots, width), dtype=torch.int64, device=device)
        return cls(layers, memory, [None] * num_slots)

    def at(self, path: str) -> SlotDeltas | None:
        return self._deltas.get(path)

    def accepts(self, adapter: Adapter) -> bool:
        """Return True if the table can describe an adapter."""
        return all(
            path in self.layers
            and len(parts) <= self.layers[path].count
            and all(one.b.shape[0] <= MAX_RANK for one in parts)
            for path, parts in adapter.deltas.items()
        )

    def describe(self, adapter: Adapter) -> npt.NDArray[np.int32]:
        """Return an adapter's row of `memory`, as words of 32 bits."""
        entries = np.zeros((self.memory.shape[1] // ENTRY, ENTRY), np.int64)
        first = 0
        for path, bounds in self.layers.items():
            for nth, one in enumerate(adapter.deltas.get(path, ())):
                entries[first + nth, :-1] = one.row
            first += bounds.count
        return entries.reshape(-1).view(np.int32)

    @property
    def max_rank(self) -> int:
        """Maximum rank of the adapters in use."""
        deltas = chain.from_iterable(each.deltas.values() for each in self.held if each is not None)
        return max((one.b.shape[0] for one in chain.from_iterable(deltas)), default=1)

    @cached_property
    def _deltas(self) -> dict[str, SlotDeltas]:
        deltas = {}
        first = 0
        for path, bounds in self.layers.items():
            end = first + bounds.count * ENTRY
            entries = self.memory[:, first:end].unflatten(1, (bounds.count, ENTRY))
            deltas[path] = SlotDeltas((), path, self, entries, bounds.alignment)
            first = end
        return deltas


@dataclass(frozen=True, eq=False)
class SlotTokens(TokenAdapters):
    """Tokens of a step, with the slots of their adapters. `max_rank` is at least the rank of each."""

    adapters: AdapterSlots
    max_rank: int
    group_rows: GroupRows

    @cached_property
    def row_tiles(self) -> RowTiles:
        """The tokens grouped by slot, which is computed at the first use."""
        return self.group_rows(self.indices, len(self.adapters.held), TILE)

    def take(self, tokens: Tensor | slice) -> "SlotTokens":
        return SlotTokens(self.adapters, self.indices[tokens], self.max_rank, self.group_rows)
