"""Triton kernels that find the limits of filters among candidates. They run after `filter_kernels`."""

import triton
import triton.language as tl

from tgis.shard.kernels.cuda.functions.filter_kernels import (
    CENTRE,
    LAST_ID,
    LOWEST_RANK,
    LOWEST_SCORE,
    NUM_LIMITS,
    count_mass,
    find_centre,
    find_range,
    find_share,
    is_filtered,
    load_block,
    rank_tokens,
    read_wanted,
)
from tgis.shard.kernels.cuda.functions.row_words import INF, NUM_WORDS, STAGED, find_highest

CHUNK = tl.constexpr(2048)  # candidates processed at once
HIGHEST_ID = tl.constexpr((1 << 31) - 1)
NO_KEY = tl.constexpr(-(1 << 40))


@triton.jit
def order_keys(ranks):
    """Return int32 keys in the order of the ranks. Zeros of both signs are equal."""
    bits = ranks.to(tl.int32, bitcast=True)
    bits = tl.where(bits == -2147483648, 0, bits)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _float_bits(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def _bits_of(key):
    """Return the bits of a key's rank."""
    bits = key.to(tl.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit(do_not_specialize_on_alignment=STAGED)
def list_candidates(logits, sampled_rows, words, highest, memory, SIZES: tl.constexpr, TYPICAL: tl.constexpr):
    """List the tokens of the range in ascending order of ids, unless there are too many."""
    sample = tl.program_id(1).to(tl.int64)
    state = words + tl.load(sampled_rows + sample).to(tl.int64) * NUM_WORDS
    if not is_filtered(state, SIZES.vocab_size, TYPICAL):
        return
    top, _peak = find_highest(highest + sample * SIZES.num_peaks, SIZES.num_peaks, SIZES.padded_peaks)
    if not (tl.abs(top) < INF):
        return
    limits = memory.limits + sample * NUM_LIMITS
    centre = 0.0
    if TYPICAL:
        moments = memory.moments + sample * SIZES.num_blocks * 2
        centre = find_centre(moments, SIZES.num_blocks, SIZES.padded_blocks)
    low, high, _wanted, _above, inside = find_range(memory, sample, state, True, SIZES, TYPICAL)
    if tl.sum(inside, 0) > SIZES.max_listed:
        return
    own = logits + sample * SIZES.vocab_size
    for block in range(tl.program_id(0), SIZES.num_blocks, tl.num_programs(0)):
        ids, scores = load_block(own, block, SIZES)
        ranks = rank_tokens(scores, ids, top, centre, state, limits, SIZES.vocab_size, TYPICAL)
        is_inside = (ranks >= low) & (ranks < high)
        first = tl.sum(tl.where(tl.arange(0, SIZES.padded_blocks) < block, inside, 0), 0)
        at = sample * SIZES.max_listed + first + tl.cumsum(is_inside.to(tl.int32), 0) - 1
        tl.store(memory.scores + at, scores, mask=is_inside)
        tl.store(memory.ids + at, ids, mask=is_inside)


@triton.jit
def _load_candidates(source, start, SIZES: tl.constexpr):
    """Return scores and ids of a chunk of the list, or of the vocabulary if there is no list."""
    logits, scores, ids, number, is_listed = source
    i = start + tl.arange(0, CHUNK)
    is_own = is_listed & (i < number)
    is_token = ~is_listed & (i < SIZES.vocab_size)
    listed = tl.load(scores + i, mask=is_own, other=-INF)
    unlisted = tl.load(logits + i, mask=is_token, other=-INF)
    token_ids = tl.load(ids + i, mask=is_own, other=0)
    return tl.where(is_listed, listed, unlisted), tl.where(is_listed, token_ids, i)


@triton.jit
def _load_keys(source, start, row, SIZES: tl.constexpr, TYPICAL: tl.constexpr):
    """Return keys (int64), ids and masses of a chunk. Tokens that are not candidates have NO_KEY."""
    top, centre, high, state, limits = row
    scores, ids = _load_candidates(source, start, SIZES)
    ranks = rank_tokens(scores, ids, top, centre, state, limits, SIZES.vocab_size, TYPICAL)
    is_candidate = (ranks > -INF) & (ranks < high)
    keys = tl.where(is_candidate, order_keys(ranks).to(tl.int64), NO_KEY)
    return keys, ids, count_mass(scores, top, SIZES.scale)


@triton.jit
def _find_key(bounds, counted, wanted, source, size, row, SIZES: tl.constexpr, TYPICAL: tl.constexpr):
    """Return the highest key such that the candidates with at least this key have the number, or the mass,
    `wanted`.

    bounds: lowest and highest possible key. The search determines two bits at a time."""
    key, last = bounds
    shift = (last - key) * 0
    while ((last - key) >> shift) > 0:
        shift += 2
    while shift > 0:
        shift -= 2
        step = tl.full((), 1, tl.int64) << shift
        one = tl.zeros((CHUNK,), tl.int64)
        two, three = one, one
        for start in range(0, size, CHUNK):
            keys, _, masses = _load_keys(source, start, row, SIZES, TYPICAL)
            amounts = tl.where(counted, 1, masses)
            one += tl.where(keys >= key + step, amounts, 0)
            two += tl.where(keys >= key + 2 * step, amounts, 0)
            three += tl.where(keys >= key + 3 * step, amounts, 0)
        num_steps = (tl.sum(one, 0) >= wanted).to(tl.int64) + (tl.sum(two, 0) >= wanted).to(tl.int64)
        key += step * (num_steps + (tl.sum(three, 0) >= wanted).to(tl.int64))
    return key


@triton.jit
def _sum_masses(key, source, size, row, SIZES: tl.constexpr, TYPICAL: tl.constexpr):
    """Return the mass of candidates above a key, and the mass and the number of candidates with the key."""
    above, equal = tl.zeros((CHUNK,), tl.int64), tl.zeros((CHUNK,), tl.int64)
    number = tl.zeros((CHUNK,), tl.int64)
    for start in range(0, size, CHUNK):
        keys, _, masses = _load_keys(source, start, row, SIZES, TYPICAL)
        above += tl.where(keys > key, masses, 0)
        equal += tl.where(keys == key, masses, 0)
        number += (keys == key).to(tl.int64)
    return tl.sum(above, 0), tl.sum(equal, 0), tl.sum(number, 0)


@triton.jit
def _find_last(key, count, source, size, row, SIZES: tl.constexpr, TYPICAL: tl.constexpr):
    """Return the id of the count-th candidate with a key."""
    num_before = count * 0
    last_id = tl.full((), -1, tl.int32)
    for start in range(0, size, CHUNK):
        keys, ids, _ = _load_keys(source, start, row, SIZES, TYPICAL)
        is_equal = (keys == key).to(tl.int32)
        is_last = (is_equal != 0) & (num_before + tl.cumsum(is_equal, 0) == count)
        last_id = tl.maximum(last_id, tl.max(tl.where(is_last, ids, -1), 0))
        num_before += tl.sum(is_equal, 0)
    return last_id


@triton.jit(do_not_specialize_on_alignment=STAGED)
def find_limits(logits, sampled_rows, words, highest, memory, SIZES: tl.constexpr, TYPICAL: tl.constexpr):
    """Find the lowest rank that sample program_id(0) keeps and, for top-p, the last kept token with that
    rank."""
    sample = tl.program_id(0).to(tl.int64)
    state = words + tl.load(sampled_rows + sample).to(tl.int64) * NUM_WORDS
    if not is_filtered(state, SIZES.vocab_size, TYPICAL):
        return
    top, _peak = find_highest(highest + sample * SIZES.num_peaks, SIZES.num_peaks, SIZES.padded_peaks)
    if not (tl.abs(top) < INF):
        return
    limits = memory.limits + sample * NUM_LIMITS
    centre = 0.0
    best = top
    if TYPICAL:
        moments = memory.moments + sample * SIZES.num_blocks * 2
        centre = find_centre(moments, SIZES.num_blocks, SIZES.padded_blocks)
        best = top * 0.0
    low, high, wanted, above, inside = find_range(memory, sample, state, True, SIZES, TYPICAL)
    number = tl.sum(inside, 0)
    is_listed = number <= SIZES.max_listed
    at = sample * SIZES.max_listed
    own = logits + sample * SIZES.vocab_size
    size = tl.where(is_listed, number, SIZES.vocab_size)
    source = own, memory.scores + at, memory.ids + at, number, is_listed
    row = top, centre, high, state, limits
    bounds = order_keys(low).to(tl.int64), order_keys(tl.minimum(high, best)).to(tl.int64)
    key, last_id = _find_limit(bounds, wanted - above, source, size, row, SIZES, TYPICAL)
    if TYPICAL:
        tl.store(limits + CENTRE, _float_bits(centre))
        tl.store(limits + LOWEST_RANK, _bits_of(key))
    else:
        tl.store(limits + LOWEST_SCORE, _bits_of(key))
        tl.store(limits + LAST_ID, last_id)


@triton.jit
def _find_limit(bounds, wanted, source, size, row, SIZES: tl.constexpr, TYPICAL: tl.constexpr):
    """Return the key of the lowest rank that is kept, and the id of the last kept token with that rank."""
    key, last = bounds
    top_k, share = read_wanted(row[3], SIZES.vocab_size, TYPICAL)
    num_equal, num_kept = tl.full((), 0, tl.int64), tl.full((), 0, tl.int64)
    for phase in range(2):  # first a number of tokens, then a share of the mass of the remaining ones
        counted = phase == 0
        if tl.where(counted, top_k > 0, share < 1.0):
            key = _find_key((key, last), counted, wanted, source, size, row, SIZES, TYPICAL)
            above, equal, num_equal = _sum_masses(key, source, size, row, SIZES, TYPICAL)
            each = tl.maximum(equal // num_equal, 1)
            num_kept = tl.where(counted, num_equal, (wanted - above + each - 1) // each)
            wanted = find_share(share, above + equal)
    last_id = tl.full((), HIGHEST_ID, tl.int32)
    if not TYPICAL:  # noqa: SIM102 - the compiler evaluates the first condition
        if num_kept < num_equal:
            last_id = _find_last(key, num_kept.to(tl.int32), source, size, row, SIZES, TYPICAL)
    return key, last_id
