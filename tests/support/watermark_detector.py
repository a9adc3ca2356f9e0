"""Finds TGI's watermark in token ids, by its publication and TGI's way to draw green lists, without this
service's code."""

import math
from functools import cache
from itertools import pairwise

import torch

HASH_KEY = 15485863


@cache
def list_green(previous: int, gamma: float, vocab_size: int) -> frozenset[int]:
    """Return the green tokens after a token, as TGI's processor draws them on a CPU."""
    rng = torch.Generator(device="cpu")
    rng.manual_seed(HASH_KEY * previous)
    order = torch.randperm(vocab_size, device="cpu", generator=rng)
    return frozenset(order[: int(vocab_size * gamma)].tolist())


def score(token_ids: list[int], gamma: float, vocab_size: int) -> float:
    """Return by how many standard deviations a text has more green tokens than one without a watermark. All
    but the first token are scored, each pair of neighbours once, as repetitions tell nothing new."""
    pairs = set(pairwise(token_ids))
    num_green = sum(token in list_green(previous, gamma, vocab_size) for previous, token in pairs)
    return (num_green - gamma * len(pairs)) / math.sqrt(len(pairs) * gamma * (1 - gamma))
