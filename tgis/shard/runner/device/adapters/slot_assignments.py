"""Assigns the adapters of open rows to slots in GPU memory."""

from collections.abc import Iterable
from math import gcd
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from tgis.shard.adapters.lora_mapping import list_widths
from tgis.shard.adapters.row_adapters import Integers, RowAdapters
from tgis.shard.kernels.cuda.grouped.slots import MAX_ALIGNMENT, AdapterSlots, TermBounds
from tgis.shard.layers.lora import Adapter, AdapterSet
from tgis.shard.layers.ops import Parts


class SlotChange(NamedTuple):
    """New content of a slot. `released` was in it, and queued steps may still read its matrices."""

    slot: int
    words: npt.NDArray[np.int32]  # row of the table of slots; empty if nothing replaces the old content
    released: Adapter | None


def allocate_slots(parts: Parts, num_slots: int, device: torch.device) -> AdapterSlots:
    """Allocate slots for the adapters of a model. Those that change single experts fit no slot."""
    layers = {}
    for path in parts.cuts:
        widths = [] if ".experts." in path else list_widths(parts, path)
        if widths:
            layers[path] = TermBounds(len(widths), gcd(MAX_ALIGNMENT, *widths))
    return AdapterSlots.allocate(layers, num_slots, device)


class SlotAssignments:
    """Slots of the adapters of open rows. There are as many slots as rows, so there is always a free one."""

    def __init__(self, slots: AdapterSlots, row_adapters: RowAdapters):
        self._slots = slots
        self._row_adapters = row_adapters
        self._of: dict[Adapter, int] = {}
        self._free = list(range(len(slots.held)))[::-1]
        self._set: AdapterSet | None = None  # for which the slots were assigned
        self._slot_by_index = np.empty(0, np.int32)
        self.max_rank = 1
        """Maximum rank of the adapters that have slots."""

    def update(self) -> list[SlotChange]:
        """Give slots to the adapters of new rows, and take them from adapters that no row has."""
        current = self._row_adapters.adapter_set
        if current is self._set:
            return []
        self._set = current
        accepted = [adapter for adapter in current.adapters if self._slots.accepts(adapter)]
        changes = [*self._release(set(self._of) - set(accepted)), *self._assign(accepted)]
        slots = [self._of.get(adapter, -1) for adapter in current.adapters]
        self._slot_by_index = np.array([*slots, -1], np.int32)  # the last one is for index -1
        self.max_rank = self._slots.max_rank
        return changes

    def find(self, rows: Integers) -> npt.NDArray[np.int32] | None:
        """Return the slots of rows' adapters, int32 [n], -1 for rows without one; None if an adapter fits no
        slot."""
        indices = self._row_adapters.indices(rows)
        slots = self._slot_by_index[indices]
        return None if ((slots < 0) & (indices >= 0)).any() else slots

    def _release(self, adapters: Iterable[Adapter]) -> list[SlotChange]:
        changes = []
        for adapter in adapters:
            slot = self._of.pop(adapter)
            self._free.append(slot)
            self._slots.held[slot] = None
            changes.append(SlotChange(slot, np.empty(0, np.int32), adapter))
        return changes

    def _assign(self, adapters: Iterable[Adapter]) -> list[SlotChange]:
        changes = []
        for adapter in adapters:
            if adapter not in self._of:
                slot = self._of[adapter] = self._free.pop()
                self._slots.held[slot] = adapter
                changes.append(SlotChange(slot, self._slots.describe(adapter), None))
        return changes
