"""Random numbers of GPUs against the CPU's and a reference model, and the arithmetic of the race."""

import random

import numpy as np
import pytest
import torch
import triton.language as tl
from torch import Tensor

from tests.support import plain_sampling
from tests.support.cuda.interpreter import interpret
from tests.support.cuda.sampled_rows import signed
from tgis.shard.kernels.cuda.functions import counter_rng as device_rng
from tgis.shard.kernels.cuda.functions import precise_math
from tgis.shard.kernels.cuda.sample import _draw_keys
from tgis.shard.kernels.cuda.step_state import Word
from tgis.shard.sampling import counter_rng

NUM_IDS = 1024


def write_draws(seeds, positions, token_ids, keys, numbers, NUM_IDS: tl.constexpr):  # type: ignore[no-untyped-def]
    draw = tl.program_id(0)
    low, high = device_rng.draw_key(
        tl.load(seeds + 2 * draw), tl.load(seeds + 2 * draw + 1), tl.load(positions + draw)
    )
    tl.store(keys + 2 * draw, low.to(tl.int32, bitcast=True))
    tl.store(keys + 2 * draw + 1, high.to(tl.int32, bitcast=True))
    i = tl.arange(0, NUM_IDS)
    uniform = device_rng.uniforms(low, high, tl.load(token_ids + i))
    tl.store(numbers + draw * NUM_IDS + i, uniform)


def write_keys(scores, numbers, weights, times, keys, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.arange(0, SIZE)
    weight = precise_math.exp_negative(tl.load(scores + i))
    time = -precise_math.log_complement(tl.load(numbers + i))
    tl.store(weights + i, weight)
    tl.store(times + i, time)
    tl.store(keys + i, tl.div_rn(weight, time))


def write_logs(x, y, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.arange(0, SIZE)
    tl.store(y + i, precise_math.log_positive(tl.load(x + i)))


def make_draws() -> tuple[list[int], list[int]]:
    rng = random.Random(0)
    seeds = [0, 1, 2**31, 2**32 - 1, 2**32, 2**63, 2**64 - 1] + [rng.getrandbits(64) for _ in range(25)]
    positions = [0, 1, 2**31 - 1] + [rng.randrange(200_000) for _ in range(len(seeds) - 3)]
    return seeds, rng.sample(positions, len(positions))


def halves(seeds: list[int]) -> Tensor:
    return torch.tensor([[signed(seed & 2**32 - 1), signed(seed >> 32)] for seed in seeds], dtype=torch.int32)


def highest_id(low: int, high: int) -> int:
    """Return the id with the highest number for a key, by inverting the hash."""
    x = 0x7FFFFFFF ^ 0x7FFFFFFF >> 16
    x = x * pow(0x846CA68B, -1, 2**32) % 2**32
    x = ((x ^ x >> 15 ^ x >> 30) - high) * pow(0x7FEB352D, -1, 2**32) % 2**32
    return signed((x ^ x >> 16 ^ low % 2**32) * pow(0x9E3779B1, -1, 2**32) % 2**32)


def test_draws_are_those_of_the_cpu() -> None:
    """Keys and uniform numbers have the same bits, for ids up to the largest vocabulary's."""
    seeds, positions = make_draws()
    token_ids = torch.randint(0, 300_000, (NUM_IDS,), dtype=torch.int32)
    wanted = counter_rng.draw_keys(np.array(seeds, np.uint64), np.array(positions))
    token_ids[:4] = torch.tensor([0, 1, 2**31 - 1, highest_id(*wanted[0].tolist())])
    keys = torch.full((len(seeds), 2), -7, dtype=torch.int32)
    numbers = torch.full((len(seeds), NUM_IDS), torch.nan)
    with np.errstate(over="ignore"):
        interpret(write_draws)[(len(seeds),)](
            halves(seeds),
            torch.tensor(positions, dtype=torch.int32),
            token_ids,
            keys,
            numbers,
            NUM_IDS=NUM_IDS,
        )
    assert torch.equal(keys, wanted)
    assert numbers[0, 3] == counter_rng.BELOW_ONE
    assert torch.equal(numbers, counter_rng.uniforms(wanted, token_ids))
    plain = [plain_sampling.uniform(seeds[i], positions[i], i) for i in range(2)]
    assert [numbers[i, (token_ids == i).nonzero()[0, 0]].item() for i in range(2)] == plain


def test_keys_of_the_twin_are_those_of_the_cpu() -> None:
    seeds, positions = make_draws()
    words = torch.full((len(seeds), len(Word)), -7, dtype=torch.int32)
    words[:, [Word.SEED_LOW, Word.SEED_HIGH]] = halves(seeds)
    words[:, Word.LENGTH] = torch.tensor(positions, dtype=torch.int32)
    assert torch.equal(
        _draw_keys(words), counter_rng.draw_keys(np.array(seeds, np.uint64), np.array(positions))
    )


def uniform_numbers(size: int) -> Tensor:
    """Return numbers of `counter_rng.uniforms`, including the minimum, the maximum and many small ones."""
    generator = torch.Generator().manual_seed(2)
    bits = torch.randint(0, 2**31, (size,), generator=generator) >> torch.arange(size) % 31
    bits[:100], bits[100:200] = torch.arange(100), 2**31 - 1 - torch.arange(100)
    return ((bits.float() + 0.5) * 2.0**-31).clamp(max=counter_rng.BELOW_ONE)


def test_keys_of_the_race_are_the_cpus_to_one_unit() -> None:
    """Weights and times; their quotient adds a rounding error."""
    size = 1 << 17
    numbers = uniform_numbers(size)
    scores = -(torch.rand(size, generator=torch.Generator().manual_seed(3)) ** 3) * 87
    scores[0] = 0
    weights, times, keys = torch.full((3, size), torch.nan)
    interpret(write_keys)[(1,)](scores, numbers, weights, times, keys, SIZE=size)
    wanted_weights, wanted_times = scores.exp(), -torch.log1p(-numbers)
    assert units_between(weights, wanted_weights).max() <= 1
    assert units_between(times, wanted_times).max() <= 1
    assert units_between(keys, wanted_weights / wanted_times).max() <= 3
    assert (errors(weights, scores.double().exp()) < 1).all()
    assert (errors(times, -torch.log1p(-numbers.double())) < 1).all()


def test_weights_beyond_the_smallest_numbers_are_zero() -> None:
    scores = torch.tensor([-torch.inf, -1e30, -104.0, -87.5, 0.0, -0.0, -1e-30, -87.0])
    weights, times, keys = torch.full((3, 8), torch.nan)
    interpret(write_keys)[(1,)](scores, torch.full((8,), 0.5), weights, times, keys, SIZE=8)
    assert weights.tolist() == [0, 0, 0, 0, 1, 1, 1, pytest.approx(np.exp(-87.0))]
    assert keys[:4].tolist() == [0, 0, 0, 0]


def test_logarithms_are_within_one_unit() -> None:
    size = 1 << 16
    x = torch.rand(size, generator=torch.Generator().manual_seed(4)) ** 8
    x[:3] = torch.tensor([1.0, 1e-37, 1 - 2.0**-24])
    x.clamp_(min=1e-37)
    y = torch.full_like(x, torch.nan)
    interpret(write_logs)[(1,)](x, y, SIZE=size)
    assert y[0] == 0
    assert (errors(y, x.double().log())[1:] < 1).all()


def units_between(a: Tensor, b: Tensor) -> Tensor:
    """Return the number of float32 values from a to b, which have equal signs."""
    return (a.view(torch.int32).long() - b.view(torch.int32)).abs()


def errors(x: Tensor, exact: Tensor) -> Tensor:
    """Return the errors of float32 values in units in the last place."""
    spacing = torch.from_numpy(np.spacing(np.abs(exact.float().numpy()))).double()
    return (x.double() - exact).abs() / spacing
