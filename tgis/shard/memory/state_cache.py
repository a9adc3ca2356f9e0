"""States of sequences in models with recurrent layers, allocated once. A state is float32, and its size does
not depend on the length of its sequence."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tgis.shard.memory.kv_cache import CPU, allocate_zeros

BLOCK = 16
_ALIGNMENT = 16  # elements
Integers = npt.NDArray[np.int64]


class StateSizes(NamedTuple):
    """Sizes of a recurrent layer on one rank: Mamba 2, or gated DeltaNet, whose keys are the groups."""

    num_heads: int
    head_dim: int
    num_groups: int
    """Number of groups of heads that share two projections: B and C, or keys and queries."""
    state_size: int
    """Width of these projections, which is the number of sums of each channel."""
    kernel_size: int
    """Number of tokens that the convolution sees."""

    @property
    def width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def group_width(self) -> int:
        return self.num_groups * self.state_size

    @property
    def num_channels(self) -> int:
        """Number of channels of the convolution."""
        return self.width + 2 * self.group_width

    @property
    def block(self) -> int:
        """Number of neighbouring channels of a head whose sums are stored together, so that they fit into the
        first-level cache."""
        return BLOCK if self.head_dim % BLOCK == 0 else self.head_dim

    @property
    def pending_width(self) -> int:
        """Number of inputs of a token that are kept until its chunk is complete: the channels after the
        convolution, and two numbers per head."""
        return self.num_channels + 2 * self.num_heads

    @property
    def window_elements(self) -> int:
        return _align((self.kernel_size - 1) * self.num_channels)

    @property
    def num_elements(self) -> int:
        """Number of elements of a layer's window and sums."""
        return self.window_elements + _align(self.width * self.state_size)


@dataclass(frozen=True)
class StateShape:
    """Shape of a sequence's state on one rank."""

    num_layers: int
    sizes: StateSizes
    chunk: int = 0
    """If not 0, the sums advance by whole chunks of that many tokens, which begin at multiples of it. The
    inputs of the tokens after the last whole chunk are pending."""

    @property
    def layer_elements(self) -> int:
        """Number of elements of one layer's state."""
        return self.sizes.num_elements + _align(self.chunk * self.sizes.pending_width)

    @property
    def num_bytes(self) -> int:
        return self.num_layers * self.layer_elements * torch.float32.itemsize


class StateCache:
    """Slots for states. A slot has, for each recurrent layer in turn, the window of the convolution's last
    inputs, [kernel_size - 1, num_channels], oldest first, the sums, [num_heads, head_dim / block, state_size,
    block], and the pending inputs, [chunk, pending_width].

    In addition, there are spare places in memory for states after drafts. If drafts are accepted, a slot
    exchanges its place with a spare one, so that nothing is copied."""

    def __init__(self, shape: StateShape, num_slots: int, device: torch.device = CPU, num_spares: int = 0):
        self.shape = shape
        self.num_slots = num_slots
        num_elements = shape.num_layers * shape.layer_elements
        self.memory = allocate_zeros((num_slots + num_spares, num_elements), torch.float32, device)
        self.places = np.arange(num_slots)  # of each slot's state in memory
        self.spares = np.arange(num_slots, num_slots + num_spares)

    @property
    def dummy_slot(self) -> int:
        """Slot that belongs to no sequence, if one was allocated for that."""
        return self.num_slots - 1

    def clear(self, slot: int) -> None:
        """Set a state to that of a sequence without tokens."""
        self.memory[self.places[slot]].zero_()

    def copy(self, source: int, target: int) -> None:
        self.memory[self.places[target]] = self.memory[self.places[source]]

    def copy_all(self, pairs: Iterable[tuple[int, int]], sources: Mapping[int, int] | None = None) -> None:
        """Copy states, each from a slot to another, in this order. `sources` has the places in memory that
        are copied instead of those of some slots."""
        for source, target in pairs:
            place = None if sources is None else sources.get(source)
            self.memory[self.places[target]] = self.memory[self.places[source] if place is None else place]

    def limit_drafts(self, max_drafts: Integers) -> Integers:
        """Return how many drafts sequences [n] may have at most. One with drafts needs a spare place for each
        of them, and one for the token before them. The first sequences get them."""
        needed = np.where(max_drafts > 0, max_drafts + 1, 0)
        left = np.maximum(len(self.spares) - (needed.cumsum() - needed) - 1, 0)
        limited: Integers = np.minimum(max_drafts, left)
        return limited

    def accept(self, slots: Integers, spares: Integers) -> None:
        """Exchange the places of slots [n] with spare places [n], given by their numbers."""
        self.places[slots], self.spares[spares] = self.spares[spares], self.places[slots]

    def windows(self, layer: int) -> Tensor:
        """Return a view of a layer's windows, by place: [num_places, kernel_size - 1, num_channels]."""
        sizes = self.shape.sizes
        count = (sizes.kernel_size - 1) * sizes.num_channels
        begin = layer * self.shape.layer_elements
        part = self.memory[:, begin : begin + count]
        return part.view(len(self.memory), sizes.kernel_size - 1, sizes.num_channels)

    def sums(self, layer: int) -> Tensor:
        """Return a view of a layer's sums, by place: [num_places, num_heads, head_dim / block, state_size,
        block]."""
        sizes = self.shape.sizes
        begin = layer * self.shape.layer_elements + sizes.window_elements
        part = self.memory[:, begin : begin + sizes.width * sizes.state_size]
        num_blocks = sizes.head_dim // sizes.block
        return part.view(len(self.memory), sizes.num_heads, num_blocks, sizes.state_size, sizes.block)

    def pending(self, layer: int) -> Tensor:
        """Return a view of a layer's pending inputs, by place: [num_places, chunk, pending_width]. Number i
        is that of the chunk's token i."""
        sizes, chunk = self.shape.sizes, self.shape.chunk
        begin = layer * self.shape.layer_elements + sizes.num_elements
        part = self.memory[:, begin : begin + chunk * sizes.pending_width]
        return part.view(len(self.memory), chunk, sizes.pending_width)


@dataclass(frozen=True)
class StepStates:
    """States of a step's sequences, which the step advances by the sequences' new tokens."""

    cache: StateCache
    slots: Tensor  # int64 [num_seqs], their places in memory; int32 in a step on a GPU, like the others
    begins: Tensor  # int64 [num_seqs + 1], index of each sequence's first new token, followed by the total
    starts: Tensor | None = None  # int64 [num_seqs], position of each first new token; for sums in chunks
    targets: Tensor | None = None  # int64 [num_tokens], places that get the states after tokens; None: slots
    drafted: "DraftedStates | None" = None

    def copy_into(self, fixed: "StepStates") -> None:
        """Copy these places into those of a captured step with as many tokens and sequences. Without targets,
        all sequences of such steps have one token."""
        fixed.slots.copy_(self.slots)
        if fixed.targets is not None and self.targets is not None:
            fixed.begins.copy_(self.begins)
            fixed.targets.copy_(self.targets)

    def list_spans(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield spans of tokens: the place of the state before one and after it, its first token and its
        end."""
        begins = self.begins.tolist()
        targets = None if self.targets is None else self.targets.tolist()
        for source, begin, end in zip(self.slots.tolist(), begins, begins[1:], strict=False):
            if begin == end:
                continue
            if targets is None or all(target == source for target in targets[begin:end]):
                yield source, source, begin, end
                continue
            for token in range(begin, end):
                yield source, targets[token], token, token + 1
                source = targets[token]


class DraftedStates(NamedTuple):
    """Sequences of a step with drafts. The states after their tokens have spare places until it is known
    which drafts are accepted."""

    rows: Integers  # [n]
    slots: Integers  # [n]
    starts: Integers  # [n], positions of the first new tokens
    spares: Integers  # [n], numbers of the spare places after the first new tokens, which others follow


def _align(num_elements: int) -> int:
    return -(-num_elements // _ALIGNMENT) * _ALIGNMENT
