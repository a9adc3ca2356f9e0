"""Mamba 2 layers: the CPU's kernels and the reference of torch operators, against transformers' scan."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1RMSNormGated
from transformers.models.granitemoehybrid import modeling_granitemoehybrid as hf

from tgis.shard.collectives import CPU
from tgis.shard.kernels.cpu.ops import CPU_KERNELS
from tgis.shard.kernels.portable.ops import TorchKernels
from tgis.shard.layers.ops import Kernels
from tgis.shard.layers.states import Gating, Mamba2
from tgis.shard.memory.state_cache import StateCache, StateShape, StateSizes, StepStates

# Widths of heads below, at and between the sizes of the vectors of any processor; more and fewer groups.
SIZES = (
    StateSizes(num_heads=4, head_dim=8, num_groups=2, state_size=12, kernel_size=4),
    StateSizes(num_heads=2, head_dim=64, num_groups=1, state_size=16, kernel_size=4),
    StateSizes(num_heads=3, head_dim=80, num_groups=3, state_size=5, kernel_size=2),
    StateSizes(num_heads=2, head_dim=48, num_groups=2, state_size=64, kernel_size=4),
)
LENGTHS = (1, 150, 7)
PLATFORMS: dict[str, Kernels] = {"cpu": CPU_KERNELS, "torch": TorchKernels(CPU)}
LAYER, NUM_LAYERS = 1, 3


def draw_mixer(sizes: StateSizes, max_step: float = float("inf")) -> Mamba2:
    channels, heads = sizes.num_channels, sizes.num_heads
    kernel, bias = torch.randn(sizes.kernel_size, channels) * 0.5, torch.randn(channels) * 0.2
    decay, time_bias, skip = -torch.rand(heads) * 3, torch.randn(heads), torch.randn(heads)
    weight = torch.rand(sizes.width) + 0.5
    return Mamba2(sizes, kernel, bias, decay, time_bias, skip, weight, 1e-5, 0.05, max_step)


def draw_rows(sizes: StateSizes, num_tokens: int) -> Tensor:
    return torch.randn(num_tokens, sizes.width + sizes.num_channels + sizes.num_heads)


def open_states(mixer: Mamba2, num_slots: int = 9) -> StateCache:
    cache = StateCache(StateShape(NUM_LAYERS, mixer.sizes), num_slots)
    cache.memory.fill_(torch.nan)  # what a slot held before must not matter
    for slot in range(num_slots):
        cache.clear(slot)
    return cache


def mix(
    kernels: Kernels, mixer: Mamba2, cache: StateCache, work: Sequence[tuple[int, Tensor]]
) -> list[Tensor]:
    """Compute a step with new rows of the sequences in some slots."""
    counts = [len(rows) for _, rows in work]
    begins = torch.tensor([0, *itertools.accumulate(counts)])
    states = StepStates(cache, torch.tensor([slot for slot, _ in work]), begins)
    rows = torch.cat([rows for _, rows in work])
    y = kernels.mix_states(rows, mixer, LAYER, states)
    return list(kernels.gate_norm(y, rows, mixer).split(counts))


def read_sums(cache: StateCache, slot: int) -> Tensor:
    """Return a layer's sums as transformers stores them, [num_heads, head_dim, state_size]."""
    return cache.sums(LAYER)[slot].transpose(2, 3).flatten(1, 2)


def expect(mixer: Mamba2, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return transformers' result for a whole sequence, and its sums, [num_heads, head_dim, state_size]."""
    sizes = mixer.sizes
    parts = [sizes.width, sizes.num_channels, sizes.num_heads]
    gate, inputs, times = rows.split(parts, -1)
    padded = F.pad(inputs.T, (sizes.kernel_size - 1, 0))
    convolved = F.silu(
        F.conv1d(padded, mixer.kernel.T.unsqueeze(1), mixer.kernel_bias, groups=sizes.num_channels)
    ).T
    x, left, right = convolved.split([sizes.width, sizes.group_width, sizes.group_width], -1)
    y, sums = hf.mamba2_chunk_scan(
        x.reshape(1, len(rows), sizes.num_heads, sizes.head_dim),
        times.unsqueeze(0),
        mixer.decay,
        *(each.reshape(1, len(rows), sizes.num_groups, sizes.state_size) for each in (left, right)),
        chunk_size=8,
        D=mixer.skip,
        dt_bias=mixer.time_bias,
        dt_softplus=True,
        dt_limit=(mixer.min_step, mixer.max_step),
        return_final_states=True,
    )
    norm = hf.GraniteMoeHybridRMSNormGated(sizes.width, sizes.width // sizes.num_groups, mixer.eps)
    norm.weight.data = mixer.norm_weight
    return norm(y.reshape(len(rows), -1), gate).detach(), sums[0]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("platform", PLATFORMS)
def test_equals_transformers(platform: str, sizes: StateSizes) -> None:
    torch.manual_seed(0)
    mixer, kernels = draw_mixer(sizes, max_step=1.5), PLATFORMS[platform]
    cache = open_states(mixer)
    before = cache.memory.clone()
    rows = {slot: draw_rows(sizes, length) for slot, length in zip((5, 0, 7), LENGTHS, strict=True)}
    for slot, y in zip(rows, mix(kernels, mixer, cache, list(rows.items())), strict=True):
        expected, sums = expect(mixer, rows[slot])
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(read_sums(cache, slot), sums, rtol=1e-4, atol=1e-5)
    others = [slot for slot in range(cache.num_slots) if slot not in rows]
    assert torch.equal(cache.memory[others], before[others])
    for layer in {*range(NUM_LAYERS)} - {LAYER}:
        assert not cache.sums(layer).any()
        assert not cache.windows(layer).any()


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_tokens_bits_depend_neither_on_cuts_nor_on_company(sizes: StateSizes) -> None:
    torch.manual_seed(1)
    mixer, rows = draw_mixer(sizes), draw_rows(sizes, 13)
    cache = open_states(mixer)
    [whole] = mix(CPU_KERNELS, mixer, cache, [(3, rows)])
    for cut in range(1, len(rows)):
        others = [draw_rows(sizes, count) for count in (cut, 1)]
        again = open_states(mixer)
        first = mix(CPU_KERNELS, mixer, again, [(1, others[0]), (3, rows[:cut])])[1]
        again.copy(3, 6)  # a snapshot, which another sequence continues
        again.copy(6, 4)
        rest = [
            mix(CPU_KERNELS, mixer, again, [(4, row.unsqueeze(0)), (0, others[1])])[0] for row in rows[cut:]
        ]
        assert torch.equal(torch.cat([first, *rest]), whole)
        assert torch.equal(again.memory[4], cache.memory[3])
        [second] = mix(CPU_KERNELS, mixer, again, [(6, rows[cut:])])
        assert torch.equal(torch.cat([first, second]), whole)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("platform", PLATFORMS)
def test_states_after_drafts_have_places_of_their_own(platform: str, sizes: StateSizes) -> None:
    torch.manual_seed(5)
    mixer, rows, kernels = draw_mixer(sizes), draw_rows(sizes, 9), PLATFORMS[platform]
    cache, alone = open_states(mixer), open_states(mixer)
    before = [rows[slice(3)], rows[slice(3, 5)]]
    for each in (cache, alone):
        mix(kernels, mixer, each, [(2, before[0]), (4, before[1])])
    kept = cache.memory.clone()
    # Three tokens with drafts after them, an empty sequence, and two tokens of a prompt.
    places, targets = torch.tensor([2, 0, 4]), torch.tensor([7, 8, 6, 4, 4])
    states = StepStates(cache, places, torch.tensor([0, 3, 3, 5]), targets=targets)
    rows = rows[slice(4, 9)]
    y = kernels.gate_norm(kernels.mix_states(rows, mixer, LAYER, states), rows, mixer)
    expected = []
    for token, place in enumerate((7, 8, 6)):
        [row] = mix(kernels, mixer, alone, [(2, rows[slice(token, token + 1)])])
        expected.append(row)
        assert torch.equal(cache.memory[place], alone.memory[2])
    [rest] = mix(kernels, mixer, alone, [(4, rows[slice(3, 5)])])
    assert torch.equal(y, torch.cat([*expected, rest]))
    assert torch.equal(cache.memory[4], alone.memory[4])
    for place in (0, 1, 2, 3, 5):
        assert torch.equal(cache.memory[place], kept[place])


def test_bits_do_not_depend_on_the_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(4)
    sizes = SIZES[2]
    mixer, rows = draw_mixer(sizes), draw_rows(sizes, 150)
    results = []
    for num_threads in (1, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=num_threads: count)
        cache = open_states(mixer)
        results.append((mix(CPU_KERNELS, mixer, cache, [(3, rows)])[0], cache.memory))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("gating", get_args(Gating))
@pytest.mark.parametrize("platform", PLATFORMS)
def test_gates_equal_transformers(platform: str, gating: Gating) -> None:
    torch.manual_seed(3)
    sizes = SIZES[0]
    mixer = replace(draw_mixer(sizes), gating=gating)
    y, rows = torch.randn(9, sizes.width), draw_rows(sizes, 9)
    gate = rows[:, : sizes.width]
    norm = FalconH1RMSNormGated(sizes.width, mixer.eps, sizes.num_groups, gating == "after_norm")
    norm.weight.data = mixer.norm_weight
    expected = y * F.silu(gate) if gating == "no_norm" else norm(y, gate).detach()
    actual = PLATFORMS[platform].gate_norm(y.clone(), rows, mixer)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def test_a_state_is_that_of_transformers_after_a_thousand_tokens() -> None:
    torch.manual_seed(2)
    sizes = SIZES[1]
    mixer, rows = draw_mixer(sizes), draw_rows(sizes, 1000)
    cache = open_states(mixer)
    for part in rows.split(300):
        mix(CPU_KERNELS, mixer, cache, [(2, part)])
    _, sums = expect(mixer, rows)
    torch.testing.assert_close(read_sums(cache, 2), sums, rtol=1e-4, atol=1e-4)
