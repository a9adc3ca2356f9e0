"""Gated DeltaNet layers: the CPU's kernels and the reference of torch operators, against transformers'."""

import itertools
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3_next import modeling_qwen3_next as hf

from tgis.shard.collectives import CPU
from tgis.shard.kernels.cpu.ops import CPU_KERNELS
from tgis.shard.kernels.portable.ops import TorchKernels
from tgis.shard.layers.ops import Kernels
from tgis.shard.layers.states import DeltaNet
from tgis.shard.memory.state_cache import StateCache, StateShape, StateSizes, StepStates

# Widths of heads below, at and between the sizes of the vectors of any processor; shared and own keys.
SIZES = (
    StateSizes(num_heads=4, head_dim=8, num_groups=2, state_size=12, kernel_size=4),
    StateSizes(num_heads=2, head_dim=64, num_groups=1, state_size=16, kernel_size=4),
    StateSizes(num_heads=3, head_dim=80, num_groups=3, state_size=5, kernel_size=2),
    StateSizes(num_heads=2, head_dim=48, num_groups=2, state_size=64, kernel_size=4),
)
LENGTHS = (1, 150, 7)
PLATFORMS: dict[str, Kernels] = {"cpu": CPU_KERNELS, "torch": TorchKernels(CPU)}
LAYER, NUM_LAYERS = 1, 3
FIRST_HEAD, TOTAL_HEADS = 2, 7  # as on the second of several ranks
Inputs = tuple[Tensor, Tensor]
"""Rows of the first matrix, and of the gates of all heads."""


def draw_mixer(sizes: StateSizes) -> DeltaNet:
    kernel = torch.randn(sizes.kernel_size, sizes.num_channels) * 0.5
    decay, time_bias = -torch.rand(sizes.num_heads) * 0.5, torch.randn(sizes.num_heads)
    bias, weight = torch.zeros(sizes.num_channels), torch.rand(sizes.head_dim) + 0.5
    return DeltaNet(sizes, FIRST_HEAD, TOTAL_HEADS, kernel, bias, decay, time_bias, weight, 1e-5)


def draw_inputs(sizes: StateSizes, num_tokens: int) -> Inputs:
    rows = torch.randn(num_tokens, sizes.width + sizes.num_channels)
    return rows, torch.randn(num_tokens, 2 * TOTAL_HEADS)


def take(inputs: Inputs, at: slice) -> Inputs:
    return inputs[0][at], inputs[1][at]


def open_states(mixer: DeltaNet, num_slots: int = 9) -> StateCache:
    cache = StateCache(StateShape(NUM_LAYERS, mixer.sizes), num_slots)
    cache.memory.fill_(torch.nan)  # what a slot held before must not matter
    for slot in range(num_slots):
        cache.clear(slot)
    return cache


def mix(
    kernels: Kernels, mixer: DeltaNet, cache: StateCache, work: Sequence[tuple[int, Inputs]]
) -> list[Tensor]:
    """Compute a step with new tokens of the sequences in some slots."""
    counts = [len(rows) for _, (rows, _) in work]
    begins = torch.tensor([0, *itertools.accumulate(counts)])
    states = StepStates(cache, torch.tensor([slot for slot, _ in work]), begins)
    rows, gates = (torch.cat([inputs[i] for _, inputs in work]) for i in range(2))
    return list(kernels.mix_delta(rows, gates, mixer, LAYER, states).split(counts))


def read_sums(cache: StateCache, slot: int) -> Tensor:
    """Return a layer's sums as transformers stores them, [num_heads, state_size, head_dim]."""
    return cache.sums(LAYER)[slot].transpose(1, 2).flatten(2)


def expect(mixer: DeltaNet, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Return transformers' result for a whole sequence, and its sums, [num_heads, state_size, head_dim]."""
    sizes, (rows, gates) = mixer.sizes, inputs
    count = len(rows)
    gate, channels = rows.split([sizes.width, sizes.num_channels], -1)
    padded = F.pad(channels.T, (sizes.kernel_size - 1, 0))
    convolved = F.silu(F.conv1d(padded, mixer.kernel.T.unsqueeze(1), groups=sizes.num_channels)).T
    queries, keys, values = convolved.split([sizes.group_width, sizes.group_width, sizes.width], -1)
    own = slice(FIRST_HEAD, FIRST_HEAD + sizes.num_heads)
    strengths, times = (each[:, own] for each in gates.split(TOTAL_HEADS, -1))
    y, sums = hf.torch_chunk_gated_delta_rule(
        *(each.reshape(1, count, sizes.num_groups, sizes.state_size) for each in (queries, keys)),
        values.reshape(1, count, sizes.num_heads, sizes.head_dim),
        g=(mixer.decay * F.softplus(times + mixer.time_bias)).unsqueeze(0),
        beta=strengths.sigmoid().unsqueeze(0),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    norm = hf.Qwen3NextRMSNormGated(sizes.head_dim, mixer.eps)
    norm.weight.data = mixer.norm_weight
    y = norm(y.reshape(-1, sizes.head_dim), gate.reshape(-1, sizes.head_dim))
    return y.reshape(count, -1).detach(), sums[0]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("platform", PLATFORMS)
def test_equals_transformers(platform: str, sizes: StateSizes) -> None:
    torch.manual_seed(0)
    mixer, kernels = draw_mixer(sizes), PLATFORMS[platform]
    cache = open_states(mixer)
    before = cache.memory.clone()
    inputs = {slot: draw_inputs(sizes, length) for slot, length in zip((5, 0, 7), LENGTHS, strict=True)}
    for slot, y in zip(inputs, mix(kernels, mixer, cache, list(inputs.items())), strict=True):
        expected, sums = expect(mixer, inputs[slot])
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(read_sums(cache, slot), sums, rtol=1e-4, atol=1e-5)
    others = [slot for slot in range(cache.num_slots) if slot not in inputs]
    assert torch.equal(cache.memory[others], before[others])
    for layer in {*range(NUM_LAYERS)} - {LAYER}:
        assert not cache.sums(layer).any()
        assert not cache.windows(layer).any()


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_tokens_bits_depend_neither_on_cuts_nor_on_company(sizes: StateSizes) -> None:
    torch.manual_seed(1)
    mixer, inputs = draw_mixer(sizes), draw_inputs(sizes, 13)
    cache = open_states(mixer)
    [whole] = mix(CPU_KERNELS, mixer, cache, [(3, inputs)])
    for cut in range(1, 13):
        others = [draw_inputs(sizes, count) for count in (cut, 1)]
        again = open_states(mixer)
        first = mix(CPU_KERNELS, mixer, again, [(1, others[0]), (3, take(inputs, slice(cut)))])[1]
        again.copy(3, 6)  # a snapshot, which another sequence continues
        again.copy(6, 4)
        rest = [
            mix(CPU_KERNELS, mixer, again, [(4, take(inputs, slice(i, i + 1))), (0, others[1])])[0]
            for i in range(cut, 13)
        ]
        assert torch.equal(torch.cat([first, *rest]), whole)
        assert torch.equal(again.memory[4], cache.memory[3])
        [second] = mix(CPU_KERNELS, mixer, again, [(6, take(inputs, slice(cut, None)))])
        assert torch.equal(torch.cat([first, second]), whole)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("platform", PLATFORMS)
def test_states_after_drafts_have_places_of_their_own(platform: str, sizes: StateSizes) -> None:
    torch.manual_seed(5)
    mixer, inputs, kernels = draw_mixer(sizes), draw_inputs(sizes, 9), PLATFORMS[platform]
    cache, alone = open_states(mixer), open_states(mixer)
    before = [take(inputs, slice(3)), take(inputs, slice(3, 5))]
    for each in (cache, alone):
        mix(kernels, mixer, each, [(2, before[0]), (4, before[1])])
    kept = cache.memory.clone()
    # Three tokens with drafts after them, an empty sequence, and two tokens of a prompt.
    places, targets = torch.tensor([2, 0, 4]), torch.tensor([7, 8, 6, 4, 4])
    states = StepStates(cache, places, torch.tensor([0, 3, 3, 5]), targets=targets)
    inputs = take(inputs, slice(4, 9))
    y = kernels.mix_delta(*inputs, mixer, LAYER, states)
    expected = []
    for token, place in enumerate((7, 8, 6)):
        [row] = mix(kernels, mixer, alone, [(2, take(inputs, slice(token, token + 1)))])
        expected.append(row)
        assert torch.equal(cache.memory[place], alone.memory[2])
    [rest] = mix(kernels, mixer, alone, [(4, take(inputs, slice(3, 5)))])
    assert torch.equal(y, torch.cat([*expected, rest]))
    assert torch.equal(cache.memory[4], alone.memory[4])
    for place in (0, 1, 2, 3, 5):
        assert torch.equal(cache.memory[place], kept[place])


def test_bits_do_not_depend_on_the_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(4)
    sizes = SIZES[2]
    mixer, inputs = draw_mixer(sizes), draw_inputs(sizes, 150)
    results = []
    for num_threads in (1, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=num_threads: count)
        cache = open_states(mixer)
        results.append((mix(CPU_KERNELS, mixer, cache, [(3, inputs)])[0], cache.memory))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.slow
def test_a_state_is_that_of_transformers_after_a_thousand_tokens() -> None:
    torch.manual_seed(2)
    sizes = SIZES[1]
    mixer, inputs = draw_mixer(sizes), draw_inputs(sizes, 1000)
    cache = open_states(mixer)
    for begin in range(0, 1000, 300):
        mix(CPU_KERNELS, mixer, cache, [(2, take(inputs, slice(begin, begin + 300)))])
    _, sums = expect(mixer, inputs)
    torch.testing.assert_close(read_sums(cache, 2), sums, rtol=1e-4, atol=1e-4)
