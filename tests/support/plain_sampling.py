"""Independent implementation of sampling for one row in plain Python: penalties, filters, choice and token
details. It shares no code with `tgis`. Every result includes how close its decisions were."""

import math
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache

import numpy as np

INF = math.inf
MASK32, MASK64 = 2**32 - 1, 2**64 - 1
# Larger penalties, and those below its inverse, have the same effect.
MAX_FACTOR = 1e16


@dataclass
class Row:
    """Inputs for one token. Floats are limited to those that a message can represent."""

    logits: list[float]
    token_ids: list[int]
    num_generated: int = 0
    eos: list[int] = field(default_factory=list)
    greedy: bool = False
    seed: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    length_penalty_start: int = 0
    length_penalty_factor: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    watermark_gamma: float = 0.0
    watermark_delta: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Scores:
    """Scores after all processors, with the smallest differences that decided what was filtered: between two
    scores, between the typicality of two tokens, and between a sum of probabilities and its limit."""

    values: list[float]
    order: float = INF
    typical_order: float = INF
    mass: float = INF


MARGINS = ("order", "typical_order", "mass")


def single(x: float) -> float:
    """Round to float32, so that ties are identical."""
    try:
        rounded: float = struct.unpack("f", struct.pack("f", x))[0]
    except OverflowError:
        return math.copysign(INF, x)
    return rounded


def singles(values: Sequence[float]) -> list[float]:
    """Round to float32, many at once."""
    try:
        return list(struct.unpack(f"{len(values)}f", struct.pack(f"{len(values)}f", *values)))
    except OverflowError:
        return [single(x) for x in values]


def add_bias(scores: list[float], row: Row) -> Scores:
    biased = singles(scores)
    for i, bias in row.logit_bias.items():
        if i < len(scores):
            biased[i] = single(scores[i] + single(bias))
    return Scores(biased)


def add_watermark(scores: list[float], row: Row) -> Scores:
    """Add TGI's watermark: the previous token seeds a permutation of the vocabulary, whose first part is
    green."""
    if row.watermark_gamma == 0:
        return Scores(scores)
    green = set(permute(row.token_ids[-1], len(scores))[: int(len(scores) * row.watermark_gamma)])
    return Scores([single(x + row.watermark_delta) if i in green else x for i, x in enumerate(scores)])


@cache
def permute(token_id: int, size: int) -> list[int]:
    """Return the Fisher-Yates shuffle with the remainders of MT19937's numbers, which numpy also
    implements."""
    draw = np.random.RandomState(15485863 * token_id & MASK32)
    numbers = draw.randint(0, 2**32, size, np.uint32).tolist()
    ids = list(range(size))
    for i, number in enumerate(numbers[:-1]):
        other = i + number % (size - i)
        ids[i], ids[other] = ids[other], ids[i]
    return ids


def treat_eos(scores: list[float], row: Row) -> Scores:
    """Apply the minimum length and the length penalty."""
    eos = {i for i in row.eos if 0 <= i < len(scores)}
    if row.num_generated < row.min_new_tokens:
        return Scores([-INF if i in eos else x for i, x in enumerate(scores)])
    overdue = row.num_generated - row.length_penalty_start
    if overdue <= 0 or row.length_penalty_factor == 1:
        return Scores(scores)
    # A float's maximum is about 1e308.
    in_reach = overdue * math.log10(row.length_penalty_factor) < 16
    growth = (row.length_penalty_factor**overdue if in_reach else MAX_FACTOR) - 1
    return Scores([single(x + abs(x) * growth) if i in eos and x > -INF else x for i, x in enumerate(scores)])


def penalise_repetition(scores: list[float], row: Row) -> Scores:
    p = single(min(max(row.repetition_penalty, single(1 / MAX_FACTOR)), single(MAX_FACTOR)))
    if p == 1:
        return Scores(scores)
    seen = set(row.token_ids)
    return Scores([single(x * p if x < 0 else x / p) if i in seen else x for i, x in enumerate(scores)])


def penalise_generated(scores: list[float], row: Row) -> Scores:
    """Apply OpenAI's penalties, which count only the answer."""
    counts = Counter(row.token_ids[len(row.token_ids) - row.num_generated :] if row.num_generated else [])
    changed = list(scores)
    for i, count in counts.items():
        penalty = single(row.presence_penalty + single(count * row.frequency_penalty))
        changed[i] = single(changed[i] - penalty)
    return Scores(changed)


def divide(scores: list[float], row: Row) -> Scores:
    return Scores(singles([x / row.temperature for x in scores]))


def keep_best(scores: list[float], row: Row) -> Scores:
    if not 0 < row.top_k < len(scores):
        return Scores(scores)
    edge = sorted(scores, reverse=True)[row.top_k - 1]
    dropped = [x for x in scores if x < edge]
    return Scores([x if x >= edge else -INF for x in scores], order=edge - max(dropped, default=-INF))


def keep_mass(scores: list[float], row: Row) -> Scores:
    """Remove ascending scores while their sum is at most 1 - top_p; among equal scores, higher ids first."""
    if row.top_p >= 1:
        return Scores(scores)
    probabilities = softmax(scores)
    rising = sorted(range(len(scores)), key=lambda i: (scores[i], -i))
    total, dropped, nearest = 0.0, set(), INF
    for i in rising[:-1]:
        total += probabilities[i]
        if scores[i] > -INF:
            nearest = min(nearest, abs(total - (1 - row.top_p)))
        if total <= 1 - row.top_p:
            dropped.add(i)
    return Scores([-INF if i in dropped else x for i, x in enumerate(scores)], mass=nearest)


def keep_likely(scores: list[float], row: Row) -> Scores:
    """Keep all tokens with at least the given fraction of the highest probability. Also record how close the
    nearest score is to it, in nats."""
    if row.min_p <= 0:
        return Scores(scores)
    highest = max(scores)
    least = highest + math.log(row.min_p)
    nearest = min((abs(x - least) for x in scores if x < highest), default=INF)
    return Scores([x if x >= least else -INF for x in scores], order=nearest, mass=nearest)


def keep_typical(scores: list[float], row: Row) -> Scores:
    limit = row.typical_p
    if limit >= 1:
        return Scores(scores)
    probabilities = softmax(scores)
    entropy = -math.fsum(p * math.log(p) for p in probabilities if p > 0)
    distance = [abs(-math.log(p) - entropy) if p > 0 else INF for p in probabilities]
    total, edge, nearest = 0.0, INF, INF
    for i in sorted(range(len(scores)), key=lambda i: distance[i]):
        total += probabilities[i]
        nearest = min(nearest, abs(total - limit))
        if total >= limit:
            edge = distance[i]
            break
    # Two tokens at almost equal distances on both sides of the entropy may swap places.
    gaps = [abs(d - edge) for d in distance if d != edge and not math.isinf(d)]
    kept = [x if d <= edge else -INF for x, d in zip(scores, distance, strict=True)]
    return Scores(kept, typical_order=min(gaps, default=INF), mass=nearest)


Processor = Callable[[list[float], Row], Scores]
HEEDED_BY_GREEDY: tuple[Processor, ...] = (
    add_bias,
    add_watermark,
    treat_eos,
    penalise_repetition,
    penalise_generated,
)
ORDER: tuple[Processor, ...] = (
    *HEEDED_BY_GREEDY,
    divide,
    keep_best,
    keep_mass,
    keep_likely,
    keep_typical,
)


def process(row: Row, order: Sequence[Processor] = ORDER) -> Scores:
    result = Scores([float(x) for x in row.logits])
    for processor in order:
        if processor in HEEDED_BY_GREEDY or not row.greedy:
            after = processor(result.values, row)
            least = (min(getattr(result, name), getattr(after, name)) for name in MARGINS)
            result = Scores(after.values, *least)
    return result


def softmax(scores: Sequence[float]) -> list[float]:
    highest = max(scores)
    weights = [math.exp(x - highest) for x in scores]
    total = math.fsum(weights)
    return [w / total for w in weights]


def uniform(seed: int, position: int, token_id: int) -> float:
    """Return the random number in (0, 1) of a token at a position."""
    low, high = _draw_bits(seed, position)
    x = (token_id * 0x9E3779B1 & MASK32) ^ low
    x = ((x ^ x >> 16) * 0x7FEB352D + high) & MASK32
    x = (x ^ x >> 15) * 0x846CA68B & MASK32
    x = (x ^ x >> 16) & 0x7FFFFFFF
    # The product of a float32 and a power of two is exact.
    return min(single(single(x) + 0.5) * 2**-31, 1 - 2**-24)


@lru_cache(1)
def _draw_bits(seed: int, position: int) -> tuple[int, int]:
    """Return the two words that all tokens of one draw share."""
    bits = _mix64((seed + 0x9E3779B97F4A7C15) & MASK64)
    bits = _mix64(bits ^ (position * 0xD1B54A32D192ED03 & MASK64))
    return bits & MASK32, bits >> 32


def _mix64(x: int) -> int:
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK64
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK64
    return x ^ x >> 31


def choose(row: Row, scores: Sequence[float]) -> tuple[int, float]:
    """Return the token and its margin, which is infinite if only equal scores, with other ids, were
    beaten."""
    ranked = list(scores)
    if not row.greedy:
        place, highest = len(row.token_ids), max(scores)
        for i, x in enumerate(scores):
            if x > -INF:
                ranked[i] = x - highest - math.log(-math.log1p(-uniform(row.seed, place, i)))
    best = max(ranked)
    others = [x for x in ranked if x < best]
    return ranked.index(best), best - max(others, default=-INF)


def logprobs(scores: Sequence[float]) -> list[float]:
    highest = max(scores)
    total = math.log(math.fsum(math.exp(x - highest) for x in scores))
    return [x - highest - total for x in scores]


def rank(scores: Sequence[float], token_id: int) -> int:
    return 1 + sum(x > scores[token_id] for x in scores)


def best_tokens(scores: Sequence[float], n: int) -> list[int]:
    """Return the tokens with the n-th highest score or more, by descending score, then ascending id: of
    these, the first 4n by id."""
    if n == 0:
        return []
    edge = sorted(scores, reverse=True)[min(n, len(scores)) - 1]
    results = [i for i, x in enumerate(scores) if x >= edge and x > -INF][: 4 * n]
    return sorted(results, key=lambda i: (-scores[i], i))


def least_gap(scores: Sequence[float], token_ids: Sequence[int]) -> float:
    """Return the smallest gap between the scores of these tokens and any unequal score. Their ranks depend on
    it."""
    gaps = [abs(scores[i] - x) for i in set(token_ids) for x in scores if x != scores[i] and x > -INF]
    return min(gaps, default=INF)
