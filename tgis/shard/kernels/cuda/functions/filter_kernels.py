"""Triton kernels of `filters`: limits of top-k, top-p and typical-p without sorting.

Tokens are ranked by score or, for typical-p, by the distance of their information from the entropy. A limit
is the lowest rank that is kept: the highest rank such that the tokens of at least this rank suffice in number
or mass. It is searched between pivots, first of the whole vocabulary, then of the tokens between two pivots.

Masses are integers, so sums do not depend on the order of additions. Programs return at once for rows without
these filters or without usable logits. No program reads results of another program of the same launch."""

import triton
import triton.language as tl

from tgis.shard.kernels.cuda.functions.precise_math import exp_negative, log_positive
from tgis.shard.kernels.cuda.functions.row_words import (
    ENDED,
    INF,
    NUM_WORDS,
    STAGED,
    find_highest,
    load_float,
)
from tgis.shard.kernels.cuda.step_state import Word

GREEDY = tl.constexpr(Word["GREEDY"])
TOP_K = tl.constexpr(Word["TOP_K"])  # 0, or at least the vocabulary's size: off
TOP_P = tl.constexpr(Word["TOP_P"])
MIN_P = tl.constexpr(Word["MIN_P"])
TYPICAL_P = tl.constexpr(Word["TYPICAL_P"])
NUM_PIVOTS = tl.constexpr(16)
LOWEST = tl.constexpr(-3.4028234663852886e38)  # lowest finite float32
# Exponent of 2 of the first pivots' spacing, and the distance from the highest score, in nats, beyond which
# masses are 0.
FIRST_EXPONENT, REACH = tl.constexpr(-4.0), tl.constexpr(43.0)
TYPICAL_SPREAD = tl.constexpr(4.0)  # spread of the first pivots of typical-p
# Words of a sample's limits, int32. Words marked float hold the bits of a float32.
LOWEST_SCORE = tl.constexpr(0)  # float: limit of top-k and top-p
LAST_ID = tl.constexpr(1)  # last kept token with the lowest score
CENTRE = tl.constexpr(2)  # float: score, relative to the highest, whose information equals the entropy
LOWEST_RANK = tl.constexpr(3)  # float: limit of typical-p
NUM_LIMITS = tl.constexpr(4)


@triton.jit
def read_filters(state, VOCAB_SIZE: tl.constexpr):
    """Return top_k and top_p. Their off values are 0 and 1."""
    top_k = tl.load(state + TOP_K)
    return tl.where(top_k < VOCAB_SIZE, top_k, 0), load_float(state + TOP_P)


@triton.jit
def is_filtered(state, VOCAB_SIZE: tl.constexpr, TYPICAL: tl.constexpr):
    top_k, top_p = read_filters(state, VOCAB_SIZE)
    is_wanted = (top_k > 0) | (top_p < 1.0)
    if TYPICAL:
        is_wanted = load_float(state + TYPICAL_P) < 1.0
    return is_wanted & (tl.load(state + ENDED) == 0) & (tl.load(state + GREEDY) == 0)


@triton.jit
def read_wanted(state, VOCAB_SIZE: tl.constexpr, TYPICAL: tl.constexpr):
    """Return the number of tokens to keep, 0 if only a share of the mass limits them, and the share."""
    top_k, share = read_filters(state, VOCAB_SIZE)
    if TYPICAL:
        top_k, share = top_k * 0, load_float(state + TYPICAL_P)
    return top_k, share


@triton.jit
def are_kept(scores, ids, top, state, limits, VOCAB_SIZE: tl.constexpr):
    """Return True for tokens that top-k, top-p and min-p keep. `top` is the row's highest score."""
    top_k, top_p = read_filters(state, VOCAB_SIZE)
    kept = scores > -INF
    if (top_k > 0) | (top_p < 1.0):
        lowest, last_id = load_float(limits + LOWEST_SCORE), tl.load(limits + LAST_ID)
        kept &= (scores > lowest) | ((scores == lowest) & (ids <= last_id))
    min_p = load_float(state + MIN_P)
    if min_p > 0.0:
        kept &= scores >= top + log_positive(min_p)
    return kept


@triton.jit
def are_typical(scores, top, state, limits):
    """Return True for tokens that typical-p keeps, provided that the other filters keep them."""
    typical = scores == scores
    if load_float(state + TYPICAL_P) < 1.0:
        typical = _typicality(scores, top, load_float(limits + CENTRE)) >= load_float(limits + LOWEST_RANK)
    return typical


@triton.jit
def _typicality(scores, top, centre):
    return -tl.abs((scores - top) - centre)


@triton.jit
def rank_tokens(scores, ids, top, centre, state, limits, VOCAB_SIZE: tl.constexpr, TYPICAL: tl.constexpr):
    """Return ranks, float32. Tokens that earlier filters removed have -inf."""
    ranks = scores
    if TYPICAL:
        kept = are_kept(scores, ids, top, state, limits, VOCAB_SIZE)
        ranks = tl.where(kept, _typicality(scores, top, centre), -INF)
    return ranks


@triton.jit
def count_mass(scores, top, SCALE: tl.constexpr):
    """Return masses, int64. A token with the highest score has mass SCALE."""
    return (exp_negative(scores - top) * SCALE).to(tl.int64)


@triton.jit
def load_block(logits, block, SIZES: tl.constexpr):
    """Return the ids and scores of a block's tokens."""
    ids = block * SIZES.block + tl.arange(0, SIZES.block)
    return ids, tl.load(logits + ids, mask=ids < SIZES.vocab_size, other=-INF)


@triton.jit
def find_centre(moments, NUM_BLOCKS: tl.constexpr, PADDED_BLOCKS: tl.constexpr):
    """Return the mean score relative to the highest, which is the score whose information equals the
    entropy."""
    block = tl.arange(0, PADDED_BLOCKS)
    mass = tl.sum(tl.load(moments + 2 * block, mask=block < NUM_BLOCKS, other=0), 0)
    moment = tl.sum(tl.load(moments + 2 * block + 1, mask=block < NUM_BLOCKS, other=0), 0)
    return -(moment.to(tl.float64) / mass.to(tl.float64)).to(tl.float32)


@triton.jit
def find_share(share, total):
    """Return a share of a mass, at least 1, so that a token is kept."""
    return tl.maximum((share.to(tl.float64) * total.to(tl.float64)).to(tl.int64), 1)


@triton.jit
def _pick(values, place):
    """Return the value at an index, or 0 for index -1. values: [NUM_PIVOTS]."""
    return tl.sum(tl.where(tl.arange(0, NUM_PIVOTS) == place, values, 0), 0)


@triton.jit
def _narrow(sums, top_k, share, wanted, keeps_upper, SIZES: tl.constexpr):
    """Return the pivots around the limit, the number or mass to keep, the part of it above the pivots, and
    the number of each block's tokens between the pivots, [padded_blocks].

    wanted: the number or mass to keep, or 0 to compute it. keeps_upper: the range has no upper end."""
    pivots, counts, masses = sums
    i, b = tl.arange(0, NUM_PIVOTS), tl.arange(0, SIZES.padded_blocks)
    at = b[:, None] * NUM_PIVOTS + i[None, :]
    is_own = at < SIZES.num_blocks * NUM_PIVOTS
    count = tl.load(counts + at, mask=is_own, other=0)  # [padded_blocks, NUM_PIVOTS]
    mass = tl.load(masses + at, mask=is_own & (top_k == 0), other=0)
    amounts = tl.where(top_k > 0, tl.sum(count, 0).to(tl.int64), tl.sum(mass, 0))  # [NUM_PIVOTS]
    total = _pick(amounts, NUM_PIVOTS - 1)
    first = tl.where(top_k > 0, tl.minimum(top_k.to(tl.int64), total), find_share(share, total))
    wanted = tl.where(wanted == 0, first, wanted)
    place = tl.sum((amounts < wanted).to(tl.int32), 0)
    upper = tl.where(keeps_upper, -1, place - 1)
    limits = tl.load(pivots + i)
    high = tl.where(upper >= 0, _pick(limits, upper), INF)
    sign = (i == place).to(tl.int32) - (i == upper).to(tl.int32)
    return _pick(limits, place), high, wanted, _pick(amounts, upper), tl.sum(count * sign[None, :], 1)


@triton.jit
def find_range(memory, sample, state, IS_SECOND: tl.constexpr, SIZES: tl.constexpr, TYPICAL: tl.constexpr):
    """Return the result of `_narrow` for the first pivots, or for the second ones if too many tokens
    remain."""
    top_k, share = read_wanted(state, SIZES.vocab_size, TYPICAL)
    keeps_upper = (top_k > 0) & (share < 1.0)  # the second limit is above the first
    size: tl.constexpr = SIZES.num_blocks * NUM_PIVOTS
    pivots, counts = memory.pivots + sample * 2 * NUM_PIVOTS, memory.counts + sample * 2 * size
    masses, unknown = memory.masses + sample * 2 * size, tl.full((), 0, tl.int64)
    low, high, wanted, above, inside = _narrow(
        (pivots, counts, masses), top_k, share, unknown, keeps_upper, SIZES
    )
    if IS_SECOND:  # noqa: SIM102 - the compiler evaluates the first condition
        if tl.sum(inside, 0) > SIZES.max_listed:
            sums = pivots + NUM_PIVOTS, counts + size, masses + size
            low, high, wanted, above, inside = _narrow(sums, top_k, share, wanted, keeps_upper, SIZES)
    return low, high, wanted, above, inside


@triton.jit
def _find_spread(highest, top, SIZES: tl.constexpr):
    """Return the difference between the highest score and the lowest maximum of a block."""
    block = tl.arange(0, SIZES.padded_peaks)
    values = tl.load(highest + block, mask=block < SIZES.num_peaks, other=INF)
    return top - tl.min(tl.where(values > -INF, values, INF), 0)


@triton.jit
def _choose_pivot(i, best, spread):
    """Return pivot i of the whole vocabulary. Pivots decrease from the highest to the lowest rank."""
    distance = spread * tl.exp2(i * 0.5 + FIRST_EXPONENT)
    distance = tl.where(i == NUM_PIVOTS - 2, tl.maximum(distance, REACH), distance)
    pivot = tl.maximum(best - distance, LOWEST)
    return tl.where(i == 0, best, tl.where(i == NUM_PIVOTS - 1, LOWEST, pivot))


@triton.jit
def _divide_range(i, low, high):
    """Return pivot i of a range with too many tokens. Pivots decrease from its upper to its lower end."""
    pivot = tl.maximum(high - (high - low) * (i / (NUM_PIVOTS - 1.0)), low)
    return tl.where(i == 0, high, tl.where(i == NUM_PIVOTS - 1, low, pivot))


@triton.jit(do_not_specialize_on_alignment=STAGED)
def sum_moments(logits, sampled_rows, words, highest, memory, SIZES: tl.constexpr):
    """Write for each block the sum of masses, and of masses times distances from the highest score."""
    sample = tl.program_id(1).to(tl.int64)
    state = words + tl.load(sampled_rows + sample).to(tl.int64) * NUM_WORDS
    if not is_filtered(state, SIZES.vocab_size, True):
        return
    top, _peak = find_highest(highest + sample * SIZES.num_peaks, SIZES.num_peaks, SIZES.padded_peaks)
    if not (tl.abs(top) < INF):
        return
    limits, own = memory.limits + sample * NUM_LIMITS, logits + sample * SIZES.vocab_size
    for block in range(tl.program_id(0), SIZES.num_blocks, tl.num_programs(0)):
        ids, scores = load_block(own, block, SIZES)
        kept = are_kept(scores, ids, top, state, limits, SIZES.vocab_size)
        weights = tl.where(kept, exp_negative(scores - top), 0.0)
        distances = tl.where(weights > 0.0, top - scores, 0.0)
        at = memory.moments + (sample * SIZES.num_blocks + block) * 2
        tl.store(at, tl.sum((weights * SIZES.scale).to(tl.int64), 0))
        tl.store(at + 1, tl.sum((weights * distances * SIZES.scale).to(tl.int64), 0))


@triton.jit(do_not_specialize_on_alignment=STAGED)
def sum_above_pivots(
    logits,
    sampled_rows,
    words,
    highest,
    memory,
    SIZES: tl.constexpr,
    IS_SECOND: tl.constexpr,
    TYPICAL: tl.constexpr,
):
    """Write the number and, unless top-k limits, the mass of each block's tokens at or above each pivot."""
    sample = tl.program_id(1).to(tl.int64)
    state = words + tl.load(sampled_rows + sample).to(tl.int64) * NUM_WORDS
    if not is_filtered(state, SIZES.vocab_size, TYPICAL):
        return
    peaks = highest + sample * SIZES.num_peaks
    top, _peak = find_highest(peaks, SIZES.num_peaks, SIZES.padded_peaks)
    if not (tl.abs(top) < INF):
        return
    best, spread, centre = top, _find_spread(peaks, top, SIZES), 0.0
    if TYPICAL:
        best, spread = top * 0.0, spread * 0.0 + TYPICAL_SPREAD
        moments = memory.moments + sample * SIZES.num_blocks * 2
        centre = find_centre(moments, SIZES.num_blocks, SIZES.padded_blocks)
    low, high = best, best
    if IS_SECOND:
        low, high, _wanted, _above, inside = find_range(memory, sample, state, False, SIZES, TYPICAL)
        if tl.sum(inside, 0) <= SIZES.max_listed:
            return
        high = tl.minimum(high, best)
    top_k, _ = read_wanted(state, SIZES.vocab_size, TYPICAL)
    limits, own = memory.limits + sample * NUM_LIMITS, logits + sample * SIZES.vocab_size
    pivots = memory.pivots + (sample * 2 + IS_SECOND) * NUM_PIVOTS
    for block in range(tl.program_id(0), SIZES.num_blocks, tl.num_programs(0)):
        ids, scores = load_block(own, block, SIZES)
        ranks = rank_tokens(scores, ids, top, centre, state, limits, SIZES.vocab_size, TYPICAL)
        masses = tl.zeros_like(scores).to(tl.int64)
        if top_k == 0:
            masses = count_mass(scores, top, SIZES.scale)
        at = ((sample * 2 + IS_SECOND) * SIZES.num_blocks + block) * NUM_PIVOTS
        for i in range(NUM_PIVOTS):
            pivot = _choose_pivot(i, best, spread)
            if IS_SECOND:
                pivot = _divide_range(i, low, high)
            is_above = ranks >= pivot
            tl.store(pivots + i, pivot, mask=block == 0)
            tl.store(memory.counts + at + i, tl.sum(is_above.to(tl.int32), 0))
            if top_k == 0:
                tl.store(memory.masses + at + i, tl.sum(tl.where(is_above, masses, 0), 0))
