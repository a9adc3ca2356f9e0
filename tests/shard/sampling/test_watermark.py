"""Check the green lists against TGI's, and against MT19937 and Fisher-Yates without torch.

The watermark of transformers differs: it hashes the tokens and draws its list on the model's device."""

import random

import numpy as np
import pytest

from tests.support.plain_sampling import permute
from tests.support.watermark_detector import list_green
from tgis.shard.sampling.watermark import MAX_CACHED, green_tokens


@pytest.mark.parametrize("vocab_size", [3, 99, 32_003])
def test_green_lists_are_those_of_tgi(vocab_size: int) -> None:
    rng = random.Random(vocab_size)
    previous = [0, vocab_size - 1, rng.randrange(vocab_size)] * 2
    gammas = [rng.choice([0.25, 0.5, 0.7, 0.1, 1.0, 1e-9]) for _ in previous]
    result = green_tokens(np.array(previous, np.int32), np.array(gammas), vocab_size)
    assert result.shape == (len(previous), vocab_size)
    for line, token_id, gamma in zip(result, previous, gammas, strict=True):
        green = set(line.nonzero()[0].tolist())
        assert green == list_green(token_id, gamma, vocab_size)
        assert green == set(permute(token_id, vocab_size)[: int(vocab_size * gamma)])


def test_lists_that_were_dropped_are_drawn_again() -> None:
    previous = np.arange(MAX_CACHED + 50, dtype=np.int32)
    gammas = np.full(len(previous), 0.5)
    first = green_tokens(previous, gammas, 64)
    assert (green_tokens(previous[:50], gammas[:50], 64) == first[:50]).all()
    assert len(np.unique(first, axis=0)) == len(first)
