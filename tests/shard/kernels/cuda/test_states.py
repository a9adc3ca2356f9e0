"""Recurrent layers by the kernels in the interpreter and by their twins, against the reference of the CPU,
which computes one token after the other."""

import itertools
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from tests.support.cuda.interpreter import interpreted
from tgis.shard.collectives import CPU
from tgis.shard.kernels.cuda.implementations import Implementations
from tgis.shard.kernels.cuda.ops import CudaKernels
from tgis.shard.kernels.cuda.step_state import STATE_CHUNK
from tgis.shard.kernels.portable.ops import TorchKernels
from tgis.shard.layers.ops import Kernels
from tgis.shard.layers.states import DeltaNet, Mamba2
from tgis.shard.memory.state_cache import StateCache, StateShape, StateSizes, StepStates

# Sizes below and at powers of two; heads that share a group and heads that do not; several programs per head.
SIZES = (
    StateSizes(num_heads=4, head_dim=8, num_groups=2, state_size=12, kernel_size=4),
    StateSizes(num_heads=2, head_dim=64, num_groups=1, state_size=128, kernel_size=4),
    StateSizes(num_heads=3, head_dim=80, num_groups=3, state_size=5, kernel_size=2),
)
TINY = StateSizes(num_heads=1, head_dim=16, num_groups=1, state_size=8, kernel_size=2)
each_size = pytest.mark.parametrize("sizes", SIZES, ids=str)
# The interpreter needs seconds for a few chunks.
COMPUTE = [
    pytest.param(interpreted, id="kernels", marks=pytest.mark.slow),
    pytest.param(Implementations.plain, id="twins"),
]
each_way = pytest.mark.parametrize("compute", COMPUTE)
KINDS = ("mamba", "delta")
each_kind = pytest.mark.parametrize("kind", KINDS)
LAYER, NUM_LAYERS, NUM_SLOTS = 1, 3, 6
FIRST_HEAD, TOTAL_HEADS = 1, 6
TOLERANCES = {"rtol": 1e-4, "atol": 1e-4}  # of sums in another order
Inputs = tuple[Tensor, Tensor]
"""Rows of the first matrix, and of the gates of all heads, which Mamba 2 lacks."""


class Layer:
    """Recurrent layer with states, by some kernels."""

    def __init__(self, kind: str, sizes: StateSizes, kernels: Kernels, chunk: int, mixer: Mamba2 | DeltaNet):
        self.kind = kind
        self.kernels = kernels
        self.mixer = mixer
        self.cache = StateCache(StateShape(NUM_LAYERS, sizes, chunk), NUM_SLOTS)
        self.cache.memory.fill_(torch.nan)  # what a slot held before must not matter
        self.lengths = [0] * NUM_SLOTS
        for slot in range(NUM_SLOTS):
            self.cache.clear(slot)

    def mix(self, work: Sequence[tuple[int, Inputs]]) -> list[Tensor]:
        """Compute a step with new tokens of the sequences in some slots."""
        counts = [len(rows) for _, (rows, _) in work]
        slots = [slot for slot, _ in work]
        begins = torch.tensor([0, *itertools.accumulate(counts)])
        starts = torch.tensor([self.lengths[slot] for slot in slots])
        states = StepStates(self.cache, torch.tensor(slots), begins, starts)
        rows, gates = (torch.cat([inputs[i] for _, inputs in work]) for i in range(2))
        for slot, count in zip(slots, counts, strict=True):
            self.lengths[slot] += count
        if isinstance(self.mixer, Mamba2):
            return list(self.kernels.mix_states(rows, self.mixer, LAYER, states).split(counts))
        return list(self.kernels.mix_delta(rows, gates, self.mixer, LAYER, states).split(counts))

    def copy(self, source: int, target: int) -> None:
        self.cache.copy(source, target)
        self.lengths[target] = self.lengths[source]


def draw_mixer(kind: str, sizes: StateSizes) -> Mamba2 | DeltaNet:
    heads = sizes.num_heads
    kernel, bias = torch.randn(sizes.kernel_size, sizes.num_channels) * 0.5, torch.randn(sizes.num_channels)
    decay, time_bias = -torch.rand(heads), torch.randn(heads)
    if kind == "delta":
        weight = torch.rand(sizes.head_dim) + 0.5
        return DeltaNet(sizes, FIRST_HEAD, TOTAL_HEADS, kernel, bias, decay, time_bias, weight, 1e-5)
    weight = torch.rand(sizes.width) + 0.5
    return Mamba2(
        sizes, kernel, bias, decay, time_bias, torch.randn(heads), weight, 1e-5, min_step=0.05, max_step=2.0
    )


def draw(kind: str, sizes: StateSizes, count: int, dtype: torch.dtype = torch.float32) -> Inputs:
    width = sizes.width + sizes.num_channels + (sizes.num_heads if kind == "mamba" else 0)
    return torch.randn(count, width).to(dtype), torch.randn(count, 2 * TOTAL_HEADS)


def take(inputs: Inputs, first: int, end: int) -> Inputs:
    return inputs[0][first:end], inputs[1][first:end]


def drop_empty(work: Sequence[tuple[int, Inputs]]) -> list[tuple[int, Inputs]]:
    """The reference needs a token of every sequence."""
    return [(slot, inputs) for slot, inputs in work if len(inputs[0])]


def open_layers(kind: str, sizes: StateSizes, compute: Callable[[], Implementations]) -> tuple[Layer, Layer]:
    """Return the same layer by these kernels and by the reference."""
    mixer = draw_mixer(kind, sizes)
    kernels = CudaKernels(CPU, compute())
    return (
        Layer(kind, sizes, kernels, STATE_CHUNK, mixer),
        Layer(kind, sizes, TorchKernels(CPU), 0, mixer),
    )


@each_kind
@each_way
@each_size
def test_equals_the_reference(kind: str, sizes: StateSizes, compute: Callable[[], Implementations]) -> None:
    """Steps of sequences whose lengths are below, at and above ends of chunks; one has no new tokens."""
    mine, theirs = open_layers(kind, sizes, compute)
    before = mine.cache.memory.clone()
    for counts in ((1, 37, 16, 0), (1, 11, 15, 3), (14, 1, 1, 13), (1, 1, 1, 1)):
        work = [(slot, draw(kind, sizes, count)) for slot, count in zip((4, 0, 3, 1), counts, strict=True)]
        results = [y for y in mine.mix(work) if len(y)]
        for y, expected in zip(results, theirs.mix(drop_empty(work)), strict=True):
            torch.testing.assert_close(y, expected, **TOLERANCES)
    assert torch.equal(mine.cache.windows(LAYER), theirs.cache.windows(LAYER))
    for slot in (2, 5):
        assert torch.equal(mine.cache.memory[slot], before[slot])
    for layer in {*range(NUM_LAYERS)} - {LAYER}:
        for view in (mine.cache.windows, mine.cache.sums, mine.cache.pending):
            assert not view(layer).any()
    work = [(slot, draw(kind, sizes, -mine.lengths[slot] % STATE_CHUNK)) for slot in (4, 0, 3, 1)]
    mine.mix(work)
    theirs.mix(drop_empty(work))
    torch.testing.assert_close(mine.cache.sums(LAYER), theirs.cache.sums(LAYER), **TOLERANCES)


def test_a_cut_prompt_has_the_same_bits() -> None:
    """A short form of the next test, for a scan of each kind in one chunk."""
    for kind in KINDS:
        inputs = draw(kind, TINY, 6)
        mixer, kernels = draw_mixer(kind, TINY), CudaKernels(CPU, interpreted())
        whole, cut = (Layer(kind, TINY, kernels, STATE_CHUNK, mixer) for _ in range(2))
        [expected] = whole.mix([(3, inputs)])
        first, _ = cut.mix([(3, take(inputs, 0, 4)), (1, take(inputs, 1, 2))])
        [rest] = cut.mix([(3, take(inputs, 4, 6))])
        assert torch.equal(torch.cat([first, rest]), expected)
        assert_same_state(cut, 3, whole, 3)


@pytest.mark.slow
@each_kind
@each_size
def test_a_tokens_bits_depend_neither_on_cuts_nor_on_company(kind: str, sizes: StateSizes) -> None:
    """Nor on whether it is part of a prompt or generated. The state has the same bits, too."""
    length = 2 * STATE_CHUNK + 3
    inputs = draw(kind, sizes, length)
    mixer, kernels = draw_mixer(kind, sizes), CudaKernels(CPU, interpreted())
    whole = Layer(kind, sizes, kernels, STATE_CHUNK, mixer)
    [expected] = whole.mix([(3, inputs)])
    for cut in (1, 7, STATE_CHUNK, STATE_CHUNK + 1, length - 1):
        layer = Layer(kind, sizes, kernels, STATE_CHUNK, mixer)
        company = [draw(kind, sizes, count) for count in (cut, 1)]
        first = layer.mix([(1, company[0]), (3, take(inputs, 0, cut))])[1]
        layer.copy(3, 5)  # a snapshot, which another sequence continues
        layer.copy(5, 4)
        middle = min(cut + 2, length)
        rest = [layer.mix([(4, take(inputs, at, at + 1)), (0, company[1])])[0] for at in range(cut, middle)]
        if middle < length:
            rest += layer.mix([(4, take(inputs, middle, length))])
        assert torch.equal(torch.cat([first, *rest]), expected)
        assert_same_state(layer, 4, whole, 3)
        [second] = layer.mix([(5, take(inputs, cut, length))])
        assert torch.equal(torch.cat([first, second]), expected)


def assert_same_state(layer: Layer, slot: int, whole: Layer, other: int) -> None:
    """What is pending of chunks that are complete does not matter."""
    for view in ("windows", "sums"):
        mine, theirs = (getattr(each.cache, view)(LAYER) for each in (layer, whole))
        assert torch.equal(mine[slot], theirs[other])
    count = whole.lengths[other] % STATE_CHUNK
    mine, theirs = (each.cache.pending(LAYER)[:, :count] for each in (layer, whole))
    assert torch.equal(mine[slot], theirs[other])


@each_kind
@each_way
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_of_16_bits(kind: str, dtype: torch.dtype, compute: Callable[[], Implementations]) -> None:
    """Only the inputs are rounded."""
    sizes = SIZES[0]
    mine, theirs = open_layers(kind, sizes, compute)
    for count in (9, 12, 1):
        rows, gates = draw(kind, sizes, count, dtype)
        [y], [expected] = mine.mix([(2, (rows, gates))]), theirs.mix([(2, (rows.float(), gates))])
        assert y.dtype == torch.float32
        torch.testing.assert_close(y, expected, **TOLERANCES)


@each_way
def test_equal_keys_with_full_strength(compute: Callable[[], Implementations]) -> None:
    """The updates of a chunk then depend on each other as much as they can."""
    sizes = SIZES[0]
    mine, theirs = open_layers("delta", sizes, compute)
    rows, gates = draw("delta", sizes, 40)
    rows[:] = rows[:1] + torch.randn(40, 1) * 1e-3
    gates[:, :TOTAL_HEADS], gates[:, TOTAL_HEADS:] = 20.0, -20.0
    [y], [expected] = (layer.mix([(0, (rows, gates))]) for layer in (mine, theirs))
    torch.testing.assert_close(y, expected, **TOLERANCES)


@each_kind
@each_way
def test_long_decays_keep_their_digits(kind: str, compute: Callable[[], Implementations]) -> None:
    """Decays from almost 0 to almost 1, over many chunks."""
    sizes = SIZES[0]
    mine, theirs = open_layers(kind, sizes, compute)
    for layer in (mine, theirs):
        layer.mixer.decay.copy_(torch.tensor([-40.0, -4.0, -1e-2, -1e-5]))
    inputs = draw(kind, sizes, 150)
    [y], [expected] = (layer.mix([(0, inputs)]) for layer in (mine, theirs))
    torch.testing.assert_close(y, expected, rtol=1e-3, atol=1e-3)
