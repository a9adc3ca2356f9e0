"""Copies numbers between the host and a device through a ring of pinned memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tgis.shard.runner.device.stream import DeviceStream, Event

Words = npt.NDArray[np.int32]

NUM_SLOTS = 8
ALIGNMENT = 4  # words; kernels are compiled for tensors that are aligned to 16 bytes


@dataclass
class PinnedSlot:
    memory: Tensor  # int32 [num_words]
    last_use: Event | None = None


class PinnedRing:
    """Ring of pinned memory for queued copies. The oldest slot is reused once its copy is done."""

    def __init__(self, stream: DeviceStream, num_words: int):
        self._stream = stream
        self._slots = [PinnedSlot(stream.pinned(num_words)) for _ in range(NUM_SLOTS)]
        self._next = 0

    def take(self, num_words: int) -> PinnedSlot:
        """Return a slot with at least `num_words`. Wait if all are in use. The caller must set the slot's
        `last_use` after queuing the copy."""
        slot = self._slots[self._next]
        if slot.last_use is not None:
            slot.last_use.wait()
        if len(slot.memory) < num_words:
            slot = self._slots[self._next] = PinnedSlot(
                self._stream.pinned(1 << (num_words - 1).bit_length())
            )
        self._next = (self._next + 1) % NUM_SLOTS
        return slot


class Uploads:
    """Uploads several arrays with one copy."""

    def __init__(self, stream: DeviceStream, num_words: int):
        self._stream = stream
        self._ring = PinnedRing(stream, num_words)

    def send(self, arrays: Sequence[Words]) -> list[Tensor]:
        """Queue the copy of the arrays to new device memory. Return the arrays on the device."""
        sizes = [array.size for array in arrays]
        memory = torch.empty(place_arrays(sizes)[1], dtype=torch.int32, device=self._stream.device)
        self.send_to(memory, arrays)
        return view_arrays(memory, [array.shape for array in arrays])

    def send_to(self, memory: Tensor, arrays: Sequence[Words]) -> None:
        """Queue the copy of the arrays to device memory, int32 [any], in the layout of `view_arrays`."""
        begins, total = place_arrays([array.size for array in arrays])
        slot = self._ring.take(total)
        host = slot.memory.numpy()
        for array, begin in zip(arrays, begins, strict=True):
            host[begin : begin + array.size] = array.reshape(-1)
        source = slot.memory[:total]
        target = memory[:total]
        self._stream.run(lambda: copy_numbers(source, target))
        slot.last_use = self._stream.record()


def view_arrays(memory: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Return views of memory, int32 [any], as arrays of these shapes."""
    sizes = [prod(shape) for shape in shapes]
    begins, _ = place_arrays(sizes)
    parts = zip(begins, sizes, shapes, strict=True)
    return [memory[begin : begin + size].view(shape) for begin, size, shape in parts]


def place_arrays(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Return the offset of each array, aligned, and the total number of words."""
    begins = []
    end = 0
    for size in sizes:
        begins.append(end)
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return begins, end


@torch.inference_mode()
def copy_numbers(source: Tensor, target: Tensor) -> None:
    target.copy_(source, non_blocking=True)
