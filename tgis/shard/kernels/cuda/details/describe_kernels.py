"""Triton kernels of `describe`. A block is `num_groups` groups of tokens of the vocabulary for one question.

Programs return at once for questions that are not asked."""

from typing import NamedTuple

import triton
import triton.language as tl

from tgis.shard.kernels.cuda.functions.limit_kernels import order_keys
from tgis.shard.kernels.cuda.functions.precise_math import exp_negative, log_positive
from tgis.shard.kernels.cuda.functions.row_words import INF, STAGED
from tgis.shard.kernels.cuda.step_state import Query
from tgis.shard.sampling import logprobs as rules

TOKEN_ID, TOP_N, IS_ASKED = (
    tl.constexpr(Query.TOKEN_ID),
    tl.constexpr(Query.TOP_N),
    tl.constexpr(Query.IS_ASKED),
)
QUERY_SIZE = tl.constexpr(len(Query))
MAX_TIES = tl.constexpr(rules.MAX_TIES)
CHUNK = tl.constexpr(8)  # groups whose top tokens are listed at once
EXCLUDED_KEY = tl.constexpr(-2139095041)  # order_keys(-inf)
HIGHEST_KEY = tl.constexpr((1 << 31) - 1)  # above the keys of all scores
# Arguments whose alignment and value vary.
VARIED = [*STAGED, "queries", "words", "logprobs", "words_stride", "logprobs_stride"]


class DetailSizes(NamedTuple):
    """Constants of the kernels."""

    vocab_size: int
    num_groups: int  # of a block
    group: int  # tokens of a group
    num_blocks: int
    padded_blocks: int
    padded_peaks: int  # number of groups of padded_blocks
    max_tops: int
    max_above: int  # maximum number of groups that contain better tokens than the n-th best group
    scale: float  # mass of a token with the highest score


@triton.jit(do_not_specialize_on_alignment=VARIED)
def sum_blocks(scores, queries, peaks, tops, masses, counts, SIZES: tl.constexpr):
    """Write the highest score of each group and, for each block, the highest score (NaN if there is one), the
    probability mass relative to it, and the number of scores above that of the question's token."""
    sample = tl.program_id(1).to(tl.int64)
    query = queries + sample * QUERY_SIZE
    if tl.load(query + IS_ASKED) == 0:
        return
    own = scores + sample * SIZES.vocab_size
    limit = tl.load(own + tl.load(query + TOKEN_ID))
    group, column = tl.arange(0, SIZES.num_groups), tl.arange(0, SIZES.group)
    for block in range(tl.program_id(0), SIZES.num_blocks, tl.num_programs(0)):
        first = block * SIZES.num_groups
        ids = (first + group)[:, None] * SIZES.group + column[None, :]
        values = tl.load(own + ids, mask=ids < SIZES.vocab_size, other=-INF)  # [num_groups, group]
        is_nan = values != values
        peak = tl.max(tl.where(is_nan, -INF, values), 1)
        top = tl.max(peak, 0)
        base = tl.where(top > -INF, top, 0.0)
        weights = tl.where(values > -INF, exp_negative(values - base), 0.0)
        at = sample * SIZES.num_blocks + block
        tl.store(peaks + sample * SIZES.num_blocks * SIZES.num_groups + first + group, peak)
        has_nan = tl.max(tl.max(is_nan.to(tl.int32), 1), 0) != 0
        tl.store(tops + at, tl.where(has_nan, float("nan"), top))
        tl.store(masses + at, tl.sum(tl.sum((weights * SIZES.scale).to(tl.int64), 1), 0))
        tl.store(counts + at, tl.sum(tl.sum((values > limit).to(tl.int32), 1), 0))


@triton.jit(do_not_specialize=VARIED, do_not_specialize_on_alignment=VARIED)
def answer(
    scores,
    queries,
    peaks,
    tops,
    masses,
    counts,
    chosen,
    words,
    logprobs,
    words_stride,
    logprobs_stride,
    SIZES: tl.constexpr,
):
    """Answer question program_id(0). chosen: memory for the numbers of groups, int32 [n, max_tops]."""
    sample = tl.program_id(0).to(tl.int64)
    query = queries + sample * QUERY_SIZE
    if tl.load(query + IS_ASKED) == 0:
        return
    block = tl.arange(0, SIZES.padded_blocks)
    at = sample * SIZES.num_blocks + block
    is_block = block < SIZES.num_blocks
    block_tops = tl.load(tops + at, mask=is_block, other=-INF)
    rank = 1 + tl.sum(tl.load(counts + at, mask=is_block, other=0), 0)
    top, log_mass = _sum_masses(block_tops, tl.load(masses + at, mask=is_block, other=0), SIZES)
    own = scores + sample * SIZES.vocab_size
    words += sample * words_stride
    logprobs += sample * logprobs_stride
    tl.store(words, rank)
    tl.store(logprobs, (tl.load(own + tl.load(query + TOKEN_ID)) - top) - log_mass)
    top_n = tl.load(query + TOP_N)
    num_tops = 0
    if (top_n > 0) & (top == top):
        own_peaks = peaks + sample * SIZES.num_blocks * SIZES.num_groups
        own_chosen = chosen + sample * SIZES.max_tops
        key = _find_edge(own, own_peaks, own_chosen, top, top_n, SIZES)
        tl.debug_barrier()  # all threads have read `chosen`
        lists = words + 2, logprobs + 1
        num_tops = _list_tops(own, own_peaks, own_chosen, key, top, log_mass, top_n, lists, SIZES)
    tl.store(words + 1, num_tops)


@triton.jit
def _sum_masses(tops, masses, SIZES: tl.constexpr):
    """Return the highest score, NaN if there is a NaN or the highest is infinite, and the logarithm of the
    sum of all masses."""
    top = tl.max(tl.where(tops != tops, -INF, tops), 0)
    is_usable = (tl.abs(top) < INF) & (tl.max((tops != tops).to(tl.int32), 0) == 0)
    factors = tl.where(tops > -INF, exp_negative(tops - top), 0.0)
    total = tl.sum((masses.to(tl.float64) * factors.to(tl.float64)).to(tl.int64), 0)
    log_mass = log_positive((total.to(tl.float64) / SIZES.scale).to(tl.float32))
    return tl.where(is_usable, top, float("nan")), log_mass


@triton.jit
def _find_nth(keys, number, low, high):
    """Return the highest key in [low, high] such that `number` of the keys are not lower, or else `low`."""
    low, high = low.to(tl.int64), high.to(tl.int64)
    shift = (high - low).to(tl.int32) * 0
    while ((high - low) >> shift) > 0:
        shift += 1
    while shift > 0:
        shift -= 1
        key = low + (tl.full((), 1, tl.int64) << shift)
        is_low = keys >= tl.minimum(key, HIGHEST_KEY).to(tl.int32)
        low = tl.where(tl.sum(is_low.to(tl.int32), 0) >= number, key, low)
    return low.to(tl.int32)


@triton.jit
def _choose_groups(peak_keys, key, chosen, maximum):
    """Write the numbers of the first `maximum` groups whose highest score has at least this key. Return how
    many they are."""
    is_chosen = peak_keys >= key
    place = tl.cumsum(is_chosen.to(tl.int32), 0) - 1
    group = tl.arange(0, peak_keys.shape[0])
    tl.store(chosen + place, group, mask=is_chosen & (place < maximum))
    tl.debug_barrier()  # other threads wrote the numbers that this thread loads
    return tl.minimum(tl.sum(is_chosen.to(tl.int32), 0), maximum)


@triton.jit
def _load_peaks(peaks, SIZES: tl.constexpr):
    """Return the keys of the groups' highest scores."""
    group = tl.arange(0, SIZES.padded_peaks)
    is_group = group < SIZES.num_blocks * SIZES.num_groups
    return order_keys(tl.load(peaks + group, mask=is_group, other=-INF))


@triton.jit
def _load_groups(own, chosen, first, num_groups, COUNT: tl.constexpr, SIZES: tl.constexpr):
    """Return the ids and scores of the tokens of `COUNT` chosen groups, in the order of ids, -inf where there
    are fewer."""
    i = tl.arange(0, COUNT * SIZES.group)
    place = first + i // SIZES.group
    group = tl.load(chosen + place, mask=place < num_groups, other=0)
    ids = group * SIZES.group + i % SIZES.group
    is_token = (place < num_groups) & (ids < SIZES.vocab_size)
    return ids, tl.load(own + ids, mask=is_token, other=-INF)


@triton.jit
def _find_edge(own, peaks, chosen, top, top_n, SIZES: tl.constexpr):
    """Return the key of the `top_n`-th highest score, or of the lowest finite score if there are fewer.

    It is at least the `top_n`-th highest score of groups. Higher scores are in fewer than `top_n` groups."""
    peak_keys = _load_peaks(peaks, SIZES)
    highest = order_keys(top)
    low = _find_nth(peak_keys, top_n, highest * 0 + EXCLUDED_KEY, highest)
    num_groups = _choose_groups(peak_keys, low + 1, chosen, SIZES.max_above)
    _, values = _load_groups(own, chosen, 0, num_groups, SIZES.max_above, SIZES)
    key = _find_nth(order_keys(values), top_n, low, highest)
    return tl.maximum(key, EXCLUDED_KEY + 1)


@triton.jit
def _list_tops(own, peaks, chosen, key, top, log_mass, top_n, lists, SIZES: tl.constexpr):
    """List the first MAX_TIES * top_n tokens whose score has at least this key. Return their number.

    Each chosen group has at least one of them."""
    ids_list, logprobs_list = lists
    maximum = MAX_TIES * top_n
    num_groups = _choose_groups(_load_peaks(peaks, SIZES), key, chosen, maximum)
    num_tops = maximum * 0
    for first in range(0, num_groups, CHUNK):
        ids, values = _load_groups(own, chosen, first, num_groups, CHUNK, SIZES)
        is_top = order_keys(values) >= key
        place = num_tops + tl.cumsum(is_top.to(tl.int32), 0) - 1
        is_listed = is_top & (place < maximum)
        tl.store(ids_list + place, ids, mask=is_listed)
        tl.store(logprobs_list + place, (values - top) - log_mass, mask=is_listed)
        num_tops += tl.sum(is_top.to(tl.int32), 0)
    return tl.minimum(num_tops, maximum)
