"""Triton kernels of `sample`. A block is BLOCK tokens of the vocabulary for one sample.

A parameter that is off costs a row only a load of its words. Only `append` handles rows that have ended."""

import triton
import triton.language as tl

from tgis.shard.kernels.cuda import step_state
from tgis.shard.kernels.cuda.functions.counter_rng import draw_key, uniforms
from tgis.shard.kernels.cuda.functions.filter_kernels import NUM_LIMITS, are_kept, are_typical
from tgis.shard.kernels.cuda.functions.precise_math import exp_negative, log_complement
from tgis.shard.kernels.cuda.functions.row_words import (
    ENDED,
    INF,
    IS_GUIDED,
    LAST_TOKEN,
    LENGTH,
    LIMIT,
    MUST_END,
    NUM_BIASES,
    NUM_STOP_IDS,
    NUM_WORDS,
    PROMPT_LEN,
    SEED_HIGH,
    SEED_LOW,
    STAGED,
    find_highest,
    load_float,
)
from tgis.shard.kernels.cuda.step_state import Flag, Query, Wanted, Word
from tgis.shard.sampling import sampler

GREEDY = tl.constexpr(Word["GREEDY"])
TEMPERATURE = tl.constexpr(Word["TEMPERATURE"])
REPETITION_PENALTY = tl.constexpr(Word["REPETITION_PENALTY"])
PRESENCE_PENALTY = tl.constexpr(Word["PRESENCE_PENALTY"])
WATERMARK_GAMMA = tl.constexpr(Word["WATERMARK_GAMMA"])
WATERMARK_DELTA = tl.constexpr(Word["WATERMARK_DELTA"])
FREQUENCY_PENALTY = tl.constexpr(Word["FREQUENCY_PENALTY"])
LENGTH_PENALTY_START = tl.constexpr(Word["LENGTH_PENALTY_START"])
LENGTH_PENALTY_FACTOR = tl.constexpr(Word["LENGTH_PENALTY_FACTOR"])
MIN_NEW_TOKENS = tl.constexpr(Word["MIN_NEW_TOKENS"])
SAMPLED_FLAG, ENDED_FLAG = tl.constexpr(Flag.SAMPLED), tl.constexpr(Flag.ENDED)
UNUSABLE_FLAG = tl.constexpr(Flag.UNUSABLE)
DETAILS, TOP_N = tl.constexpr(Word.DETAILS), tl.constexpr(Word.TOP_N)
FINAL, RAW = tl.constexpr(Wanted.FINAL), tl.constexpr(Wanted.RAW)
TOKEN_ID, QUERY_TOP_N = tl.constexpr(Query.TOKEN_ID), tl.constexpr(Query.TOP_N)
IS_ASKED = tl.constexpr(Query.IS_ASKED)
QUERY_SIZE = tl.constexpr(len(Query))

MAX_FACTOR = tl.constexpr(float(sampler.MAX_FACTOR))
MIN_FACTOR = tl.constexpr(float(1 / sampler.MAX_FACTOR))
MAX_COUNT = tl.constexpr(step_state.MAX_COUNT)


@triton.jit(do_not_specialize_on_alignment=STAGED)
def adjust(
    logits,
    sampled_rows,
    words,
    masks,
    greens,
    bias_token_ids,
    biases,
    stop_ids,
    token_counts,
    highest,
    best,
    described,
    VOCAB_SIZE: tl.constexpr,
    MAX_BIASES: tl.constexpr,
    MAX_STOP_IDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Apply the row's parameters to the logits of block program_id(0) of sample program_id(1).

    Writes the block's highest logit (NaN if there is one) and its token id, the lowest of equals. The logits
    are written only if they have changed and a token will be drawn. described: None, or the scores of
    `DetailQuestions`, which receive those that a row's details need, unless `race` writes them."""
    sample = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * BLOCK
    ids = first + tl.arange(0, BLOCK)
    own = logits + sample * VOCAB_SIZE
    # Loaded before the row's words are known, so that both loads overlap.
    scores = tl.load(own + ids, mask=ids < VOCAB_SIZE, other=-INF)  # [BLOCK]
    row = tl.load(sampled_rows + sample).to(tl.int64)
    state = words + row * NUM_WORDS
    if tl.load(state + ENDED) != 0:
        return
    _describe(described, True, RAW, state, sample, ids, scores, VOCAB_SIZE)
    num_biases = tl.load(state + NUM_BIASES)
    if num_biases > 0:
        at = row * MAX_BIASES
        _add_biases(own, bias_token_ids + at, biases + at, num_biases, first, BLOCK, MAX_BIASES)
        tl.debug_barrier()  # other threads wrote the logits that this thread loads
        scores = tl.load(own + ids, mask=ids < VOCAB_SIZE, other=-INF)
    at = row * ((VOCAB_SIZE + 31) // 32)
    bits = masks + at, greens + at
    stops, counts = stop_ids + row * MAX_STOP_IDS, token_counts + row * VOCAB_SIZE
    scores, is_changed = _change(scores, ids, state, bits, stops, counts, VOCAB_SIZE)
    is_greedy = tl.load(state + GREEDY) != 0
    if is_changed & ~is_greedy:
        tl.store(own + ids, scores, mask=ids < VOCAB_SIZE)
    _describe(described, is_greedy, FINAL, state, sample, ids, scores, VOCAB_SIZE)
    _store_highest(scores, first, sample, highest, best)


@triton.jit
def _store_highest(scores, first, sample, highest, best):
    is_nan = scores != scores
    value, place = tl.max(tl.where(is_nan, -INF, scores), 0, return_indices=True)
    at = sample * tl.num_programs(0) + tl.program_id(0)
    tl.store(highest + at, tl.where(tl.max(is_nan.to(tl.int32), 0) != 0, float("nan"), value))
    tl.store(best + at, first + place)


@triton.jit
def _describe(described, is_final, kind, state, sample, ids, scores, VOCAB_SIZE: tl.constexpr):
    """Store the scores from which the row's details are computed, if it wants this kind and they are
    final."""
    if described is not None:  # noqa: SIM102 - the compiler evaluates the first condition
        if is_final & (tl.load(state + DETAILS) == kind):
            tl.store(described + sample * VOCAB_SIZE + ids, scores, mask=ids < VOCAB_SIZE)


@triton.jit
def _change(scores, ids, state, bits, stop_ids, token_counts, VOCAB_SIZE: tl.constexpr):
    """Apply all parameters except biases. Also return whether any was applied."""
    allowed, greens = bits
    is_guided = tl.load(state + IS_GUIDED) != 0
    if is_guided:
        scores = tl.where(_load_bits(allowed, ids, VOCAB_SIZE), scores, -INF)
    is_marked = load_float(state + WATERMARK_GAMMA) > 0.0
    if is_marked:
        greener = scores + load_float(state + WATERMARK_DELTA)
        scores = tl.where(_load_bits(greens, ids, VOCAB_SIZE), greener, scores)
    num_generated = tl.load(state + LENGTH) - tl.load(state + PROMPT_LEN)
    is_early = (num_generated < tl.load(state + MIN_NEW_TOKENS)) & (tl.load(state + MUST_END) == 0)
    overdue = num_generated - tl.load(state + LENGTH_PENALTY_START)
    factor = load_float(state + LENGTH_PENALTY_FACTOR)
    treats_stops = is_early | ((overdue > 0) & (factor != 1.0))
    if treats_stops:
        is_stop = _find_stops(ids, stop_ids, tl.load(state + NUM_STOP_IDS))
        scores = tl.where(is_stop, _treat_stops(scores, is_early, factor, overdue), scores)
    repetition = load_float(state + REPETITION_PENALTY)
    presence, frequency = load_float(state + PRESENCE_PENALTY), load_float(state + FREQUENCY_PENALTY)
    penalises = (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0)
    if penalises:
        counts = tl.load(token_counts + ids, mask=ids < VOCAB_SIZE, other=0).to(tl.int32)
        scores = _penalise(scores, counts, repetition, presence, frequency)
    temperature = load_float(state + TEMPERATURE)
    if temperature != 1.0:
        scores = tl.div_rn(scores, temperature)
    return scores, is_guided | is_marked | treats_stops | penalises | (temperature != 1.0)


@triton.jit
def _load_bits(words, ids, VOCAB_SIZE: tl.constexpr):
    bits = tl.load(words + ids // 32, mask=ids < VOCAB_SIZE, other=0)
    return (bits >> (ids % 32)) & 1 != 0


@triton.jit
def _add_biases(own, token_ids, biases, num_biases, first, BLOCK: tl.constexpr, MAX_BIASES: tl.constexpr):
    """Add the biases of tokens in the block to the logits in memory."""
    i = tl.arange(0, MAX_BIASES)
    token_id = tl.load(token_ids + i, mask=i < num_biases, other=-1)
    is_mine = (token_id >= first) & (token_id < first + BLOCK)
    changed = tl.load(own + token_id, mask=is_mine, other=0.0) + tl.load(biases + i, mask=is_mine, other=0.0)
    tl.store(own + token_id, changed, mask=is_mine)


@triton.jit
def _find_stops(ids, stop_ids, num_stop_ids):
    is_stop = ids < 0
    for i in range(num_stop_ids):
        is_stop |= ids == tl.load(stop_ids + i)
    return is_stop


@triton.jit
def _treat_stops(scores, is_early, factor, overdue):
    """Return the scores of stop tokens: -inf before `min_new_tokens`, later with the length penalty."""
    exponent = tl.where(is_early, 0, overdue)
    power = tl.full((), 1.0, tl.float64)
    square = factor.to(tl.float64)
    while exponent > 0:
        power = tl.where(exponent & 1 != 0, power * square, power)
        square *= square
        exponent >>= 1
    growth = (tl.minimum(power, MAX_FACTOR) - 1.0).to(tl.float32)
    sizes = tl.where(tl.abs(scores) == INF, 0.0, tl.abs(scores))  # infinities do not change
    return tl.where(is_early, -INF, scores + sizes * growth)


@triton.jit
def _penalise(scores, counts, repetition, presence, frequency):
    """Apply the penalties of tokens that occurred. counts: `RowState.token_counts` of the row."""
    factor = tl.minimum(tl.maximum(repetition, MIN_FACTOR), MAX_FACTOR)
    penalised = tl.where(scores < 0.0, scores * factor, tl.div_rn(scores, factor))
    scores = tl.where(counts != 0, penalised, scores)
    num_generated = counts & MAX_COUNT
    penalty = presence + frequency * num_generated.to(tl.float32)
    return tl.where(num_generated > 0, scores - penalty, scores)


@triton.jit(do_not_specialize_on_alignment=STAGED)
def race(
    logits,
    sampled_rows,
    words,
    highest,
    limits,
    keys,
    winners,
    described,
    VOCAB_SIZE: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    PADDED_BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the best key of `counter_rng.draw_columns` in the block and its token id, the lowest of equals.

    The grid, `highest` and `described` are those of `adjust`. limits come from `filters.find_limits`."""
    sample = tl.program_id(1).to(tl.int64)
    state = words + tl.load(sampled_rows + sample).to(tl.int64) * NUM_WORDS
    if (tl.load(state + ENDED) != 0) | (tl.load(state + GREEDY) != 0):
        return
    top, _ = find_highest(highest + sample * NUM_BLOCKS, NUM_BLOCKS, PADDED_BLOCKS)
    if not (tl.abs(top) < INF):
        return
    first = tl.program_id(0) * BLOCK
    ids = first + tl.arange(0, BLOCK)
    scores = tl.load(logits + sample * VOCAB_SIZE + ids, mask=ids < VOCAB_SIZE, other=-INF)  # [BLOCK]
    own = limits + sample * NUM_LIMITS
    kept = are_kept(scores, ids, top, state, own, VOCAB_SIZE) & are_typical(scores, top, state, own)
    _describe(described, True, FINAL, state, sample, ids, tl.where(kept, scores, -INF), VOCAB_SIZE)
    weights = tl.where(kept, exp_negative(scores - top), 0.0)
    seed_low, seed_high = tl.load(state + SEED_LOW), tl.load(state + SEED_HIGH)
    key_low, key_high = draw_key(seed_low, seed_high, tl.load(state + LENGTH))
    times = -log_complement(uniforms(key_low, key_high, ids))
    key, place = tl.max(tl.div_rn(weights, times), 0, return_indices=True)
    at = sample * NUM_BLOCKS + tl.program_id(0)
    tl.store(keys + at, key)
    tl.store(winners + at, first + place)


@triton.jit(do_not_specialize_on_alignment=STAGED)
def append(
    sampled_rows,
    words,
    stop_ids,
    token_counts,
    highest,
    best,
    keys,
    winners,
    answers,
    queries,
    VOCAB_SIZE: tl.constexpr,
    MAX_STOP_IDS: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    PADDED_BLOCKS: tl.constexpr,
):
    """Choose the token of sample program_id(0), append it to its row and write the answer and, unless
    `queries` is None, the question for its details.

    A program must be one warp, because all its threads load the state before it is changed."""
    sample = tl.program_id(0).to(tl.int64)
    row = tl.load(sampled_rows + sample).to(tl.int64)
    state = words + row * NUM_WORDS
    blocks = sample * NUM_BLOCKS
    if queries is not None:
        tl.store(queries + sample * QUERY_SIZE + IS_ASKED, 0)
    if tl.load(state + ENDED) != 0:
        _answer(answers, sample, 0, 0)
        return
    top, place = find_highest(highest + blocks, NUM_BLOCKS, PADDED_BLOCKS)
    if not (tl.abs(top) < INF):
        _answer(answers, sample, 0, UNUSABLE_FLAG)
        tl.store(state + ENDED, 1)
        return
    if tl.load(state + GREEDY) != 0:
        token = tl.load(best + blocks + place)
    else:
        _, place = find_highest(keys + blocks, NUM_BLOCKS, PADDED_BLOCKS)
        token = tl.load(winners + blocks + place)
    length = tl.load(state + LENGTH) + 1
    is_stop = _is_stop(token, stop_ids + row * MAX_STOP_IDS, tl.load(state + NUM_STOP_IDS), MAX_STOP_IDS)
    has_ended = is_stop | (length >= tl.load(state + LIMIT))
    _ask(queries, sample, token, state)
    count = token_counts + row * VOCAB_SIZE + token
    counted = _add_one(tl.load(count))
    _answer(answers, sample, token, tl.where(has_ended, SAMPLED_FLAG | ENDED_FLAG, SAMPLED_FLAG))
    tl.store(state + LENGTH, length)
    tl.store(state + LAST_TOKEN, token)
    tl.store(state + ENDED, has_ended.to(tl.int32))
    tl.store(count, counted)


@triton.jit
def _answer(answers, sample, token, flags):
    tl.store(answers + 2 * sample, token)
    tl.store(answers + 2 * sample + 1, flags)


@triton.jit
def _add_one(count):
    """Return a count of `RowState.token_counts` after one more token."""
    count = count.to(tl.int32)
    is_counted = (count & MAX_COUNT) < MAX_COUNT
    return (count + is_counted.to(tl.int32)).to(tl.int16)


@triton.jit
def _is_stop(token, stop_ids, num_stop_ids, MAX_STOP_IDS: tl.constexpr):
    i = tl.arange(0, MAX_STOP_IDS)
    stops = tl.load(stop_ids + i, mask=i < num_stop_ids, other=-1)
    return tl.max((stops == token).to(tl.int32), 0) != 0


@triton.jit
def _ask(queries, sample, token, state):
    if queries is not None:
        query = queries + sample * QUERY_SIZE
        tl.store(query + TOKEN_ID, token)
        tl.store(query + QUERY_TOP_N, tl.load(state + TOP_N))
        tl.store(query + IS_ASKED, (tl.load(state + DETAILS) != 0).to(tl.int32))
