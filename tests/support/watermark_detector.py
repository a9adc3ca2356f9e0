"""Detects TGI's watermark in token ids, following the publication and TGI's green lists, without this
service's code."""

import math
from functools import cache
from itertools import pairwise

import torch

HASH_KEY = 15485863


@cache
def list_green(previous: int, gamma: float, vocab_size: int) -> frozenset[int]:
    """Return the green tokens after a token, as drawn by TGI's processor on a CPU."""
    rng = torch.Generator(device="cpu")
    rng.manual_seed(HASH_KEY * previous)
    order = torch.randperm(vocab_size, device="cpu", generator=rng)
    return frozenset(order[: int(vocab_size * gamma)].tolist())


def score(token_ids: list[int], gamma: float, vocab_size: int) -> float:
    """Return by how many standard deviations a text has more green tokens than expected without a watermark.
    All tokens but the first are scored. Each pair of neighbours counts once, because repetitions add no
    information."""
    pairs = set(pairwise(token_ids))
    num_green = sum(token in list_green(previous, gamma, vocab_size) for previous, token in pairs)
    return (num_green - gamma * len(pairs)) / math.sqrt(len(pairs) * gamma * (1 - gamma))
