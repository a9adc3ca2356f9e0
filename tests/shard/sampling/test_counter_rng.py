"""Check that sampling follows the probabilities and that its noise shows no pattern in counts."""

import math

import numpy as np
import pytest
import torch

from tgis.shard.sampling.counter_rng import draw_columns, draw_keys, uniforms


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """Return how many standard deviations the statistic lies from its expected value."""
    expected = probabilities * counts.sum()
    freedom = len(counts) - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom))


@pytest.mark.parametrize("vary", ["seed", "position", "high bits"])
def test_choice_follows_the_probabilities(vary: str) -> None:
    num_draws = 20_000
    counter = np.arange(num_draws)
    fixed = np.zeros(num_draws, np.int64)
    seeds, positions = {
        "seed": (counter, fixed + 17),
        "position": (fixed + 12345, counter),
        "high bits": (counter.astype(np.uint64) << np.uint64(40), fixed),
    }[vary]
    scores = torch.linspace(-4, 2, 60)
    keys = draw_keys(seeds.astype(np.uint64), positions)
    drawn = draw_columns(scores.expand(num_draws, -1), keys, torch.arange(60, dtype=torch.int32)).numpy()
    probabilities = scores.double().softmax(-1).numpy()
    assert abs(chi_square(np.bincount(drawn, minlength=60), probabilities)) < 4
    halves = (drawn >= 48).astype(int)
    share = halves.mean()
    pairs = np.bincount(halves[:-1] * 2 + halves[1:], minlength=4)
    joint = np.outer([1 - share, share], [1 - share, share]).flatten()
    assert chi_square(pairs, joint) < 4


def test_noise_of_neighbours_is_independent() -> None:
    u = uniforms(
        draw_keys(np.full(2000, 7, np.uint64), np.arange(2000)), torch.arange(1000, dtype=torch.int32)
    )
    cells = (u * 16).int()
    even = np.full(256, 1 / 256)
    for a, b in [(cells[:, :-1], cells[:, 1:]), (cells[:-1], cells[1:]), (cells[:, :-64], cells[:, 64:])]:
        assert abs(chi_square(torch.bincount((a * 16 + b).flatten(), minlength=256).numpy(), even)) < 4
    assert u.min() > 0
    assert u.max() < 1
    assert (u < 1e-3).sum().item() == pytest.approx(2000, abs=4 * math.sqrt(2000))


def test_noise_is_pinned() -> None:
    """Check fixed noise values: a change of them changes every seeded answer that users have seen."""
    keys = draw_keys(np.array([0, 42, 2**64 - 1], np.uint64), np.array([0, 7, 100_000]))
    assert keys.tolist() == PINNED_KEYS
    assert (
        uniforms(keys, torch.tensor([0, 1, 50_000], dtype=torch.int32)) * 2**24
    ).int().tolist() == PINNED_NOISE


PINNED_KEYS = [[-12790593, 1210155558], [-41403766, 1483012645], [-1411967115, -145510734]]
PINNED_NOISE = [[5104546, 10159384, 6027997], [15771932, 16379110, 3320025], [4053578, 13456051, 5602280]]
