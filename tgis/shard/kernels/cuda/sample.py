"""Samples the next tokens of rows and appends them to the rows' state on the device.

Logits are changed in the order of `sampling.sampler`. Details of the tokens are computed by `describe` from
scores that `sample` writes."""

import torch
import triton
from torch import Tensor

from tgis.shard.kernels.cuda.functions import filters
from tgis.shard.kernels.cuda.functions.sample_kernels import adjust, append, race
from tgis.shard.kernels.cuda.step_state import (
    MAX_BIASES,
    MAX_COUNT,
    MAX_STOP_IDS,
    DetailQuestions,
    Flag,
    Query,
    RowState,
    Wanted,
    Word,
    as_float,
)
from tgis.shard.sampling.counter_rng import GOLDEN, STRIDE, draw_columns
from tgis.shard.sampling.sampler import MAX_FACTOR

BLOCK, NUM_WARPS = 2048, 4  # 16 tokens per thread; a single sample occupies half of a GPU


def launch(
    logits: Tensor,
    rows: RowState,
    sampled_rows: Tensor,
    answers: Tensor,
    questions: DetailQuestions | None = None,
) -> None:
    """Sample from logits, contiguous float32 [n, vocab_size].

    Logits of rows that draw a token are changed in place, those of ended rows are not, and those of other
    rows are undefined afterwards. sampled_rows: int32 [n], each row at most once, except the idle row.
    answers: int32 [n, 2], receives the token and `Flag`s. Ended rows are not sampled, and their flags are 0.
    questions, if given, receives those for the details that rows want, and does not change the tokens."""
    num_samples, vocab_size = logits.shape
    assert logits.is_contiguous(), "rows are contiguous"
    if not num_samples:
        return
    num_blocks = triton.cdiv(vocab_size, BLOCK)
    # Highest logit and best key of each block, and the ids of their tokens.
    highest, keys = (logits.new_empty(num_samples, num_blocks) for _ in range(2))
    best, winners = (torch.empty_like(highest, dtype=torch.int32) for _ in range(2))
    inputs = (logits, sampled_rows, rows.words)
    options = {"num_warps": NUM_WARPS, "enable_fp_fusion": False}
    sizes = {"VOCAB_SIZE": vocab_size, "MAX_STOP_IDS": MAX_STOP_IDS}
    blocks = {"NUM_BLOCKS": num_blocks, "PADDED_BLOCKS": triton.next_power_of_2(num_blocks)}
    biases = rows.bias_token_ids, rows.biases
    described, queries = (None, None) if questions is None else questions
    adjust[num_blocks, num_samples](
        *inputs,
        rows.masks,
        rows.greens,
        *biases,
        rows.stop_ids,
        rows.token_counts,
        highest,
        best,
        described,
        MAX_BIASES=MAX_BIASES,
        BLOCK=BLOCK,
        **sizes,
        **options,
    )
    limits = filters.find_limits(*inputs, highest)
    race_results = keys, winners
    raced = {"VOCAB_SIZE": vocab_size, "BLOCK": BLOCK, **blocks, **options}
    race[num_blocks, num_samples](*inputs, highest, limits, *race_results, described, **raced)
    tables = rows.words, rows.stop_ids, rows.token_counts
    append[(num_samples,)](
        sampled_rows, *tables, highest, best, *race_results, answers, queries, **sizes, **blocks, num_warps=1
    )


def plain(
    logits: Tensor,
    rows: RowState,
    sampled_rows: Tensor,
    answers: Tensor,
    questions: DetailQuestions | None = None,
) -> None:
    index = sampled_rows.long()
    words = rows.words[index]  # [n, len(Word)]
    raw = logits.clone()
    _change(logits, rows, index, words)
    logits.copy_(torch.where(words[:, Word.ENDED, None] != 0, raw, logits))
    highest = logits.max(-1).values
    best = logits.argmax(-1)
    is_usable = highest.isfinite()
    scores = logits.nan_to_num(0.0, 0.0, -torch.inf)  # unusable rows draw an arbitrary token
    filters.filter_sorted(scores, highest, words)
    ids = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)
    drawn = draw_columns(scores, _draw_keys(words), ids)
    tokens = torch.where(words[:, Word["GREEDY"]] != 0, best, drawn)
    if questions is not None:
        _ask(questions, raw, logits, scores, tokens, is_usable, words)
    _append(tokens, is_usable, rows, index, words, answers)


def _ask(
    questions: DetailQuestions,
    raw: Tensor,
    logits: Tensor,
    scores: Tensor,
    tokens: Tensor,
    is_usable: Tensor,
    words: Tensor,
) -> None:
    """Write the questions of rows that sample a token. `logits` are changed, `scores` also filtered."""
    is_sampled = (words[:, Word.ENDED] == 0) & is_usable
    wanted = words[:, Word.DETAILS]
    final = torch.where(words[:, Word["GREEDY"], None] != 0, logits, scores)
    described = torch.where(wanted[:, None] == int(Wanted.RAW), raw, final)
    is_asked = is_sampled & (wanted != 0)
    questions.scores.copy_(torch.where(is_asked[:, None], described, questions.scores))
    asked = torch.stack((tokens.int(), words[:, Word.TOP_N], is_asked.int()), 1)
    unasked = questions.queries.clone()
    unasked[:, int(Query.IS_ASKED)] = 0
    questions.queries.copy_(torch.where(is_sampled[:, None], asked, unasked))


def _change(logits: Tensor, rows: RowState, index: Tensor, words: Tensor) -> None:
    """Apply all changes to logits before the draw, in place."""
    vocab_size = logits.shape[1]
    ids = torch.arange(vocab_size, device=logits.device)
    bits = rows.masks[index][:, ids // 32] >> (ids % 32).int()  # [n, vocab_size]
    logits.masked_fill_((words[:, Word.IS_GUIDED, None] != 0) & (bits & 1 == 0), -torch.inf)
    bias_ids = rows.bias_token_ids[index].long()  # [n, MAX_BIASES]
    has_bias = torch.arange(bias_ids.shape[1], device=ids.device) < words[:, Word.NUM_BIASES, None]
    logits.scatter_add_(1, bias_ids.where(has_bias, 0), rows.biases[index].where(has_bias, 0.0))
    is_green = (rows.greens[index][:, ids // 32] >> (ids % 32).int()) & 1 != 0
    is_marked = as_float(words[:, Word["WATERMARK_GAMMA"]]) > 0
    delta = as_float(words[:, Word["WATERMARK_DELTA"]])
    logits.copy_(torch.where(is_green & is_marked[:, None], logits + delta[:, None], logits))
    num_generated = words[:, Word.LENGTH] - words[:, Word.PROMPT_LEN]
    is_early = (num_generated < words[:, Word["MIN_NEW_TOKENS"]]) & (words[:, Word.MUST_END] == 0)
    is_stop = _stop_mask(rows.stop_ids[index], words, vocab_size)
    logits.masked_fill_(is_stop & is_early[:, None], -torch.inf)
    overdue = num_generated - words[:, Word["LENGTH_PENALTY_START"]]
    overdue = overdue.where(~is_early & (overdue > 0), 0)
    factor = as_float(words[:, Word["LENGTH_PENALTY_FACTOR"]]).double() ** overdue
    growth = (factor.clamp(max=float(MAX_FACTOR)) - 1).float()[:, None]
    grown = torch.where(logits.isinf(), logits, logits + logits.abs() * growth)
    logits.copy_(torch.where(is_stop & (growth != 0), grown, logits))
    _penalise(logits, rows.token_counts[index], words)
    logits /= as_float(words[:, Word["TEMPERATURE"]])[:, None]


def _stop_mask(stop_ids: Tensor, words: Tensor, vocab_size: int) -> Tensor:
    """Return bool [n, vocab_size], True for stop ids."""
    is_stop = torch.zeros((len(stop_ids), vocab_size + 1), dtype=torch.bool, device=stop_ids.device)
    is_given = _is_given(stop_ids, words) & (stop_ids < vocab_size)
    is_stop.scatter_(1, stop_ids.long().where(is_given, vocab_size), True)
    return is_stop[:, :vocab_size]


def _is_given(stop_ids: Tensor, words: Tensor) -> Tensor:
    return torch.arange(stop_ids.shape[1], device=stop_ids.device) < words[:, Word.NUM_STOP_IDS, None]


def _penalise(logits: Tensor, counts: Tensor, words: Tensor) -> None:
    """Apply the penalties of tokens that occurred. counts: `RowState.token_counts` of the rows, [n,
    vocab_size]."""
    max_factor = float(MAX_FACTOR)
    penalty = as_float(words[:, Word["REPETITION_PENALTY"]]).clamp(1 / max_factor, max_factor)[:, None]
    penalised = torch.where(logits < 0, logits * penalty, logits / penalty)
    logits.copy_(torch.where(counts != 0, penalised, logits))
    num_generated = counts.int() & MAX_COUNT
    presence = as_float(words[:, Word["PRESENCE_PENALTY"]])[:, None]
    frequency = as_float(words[:, Word["FREQUENCY_PENALTY"]])[:, None]
    penalty = presence + frequency * num_generated
    logits -= penalty.where(num_generated > 0, 0.0)


def _draw_keys(words: Tensor) -> Tensor:
    """Return the keys of `counter_rng.draw_keys`, int32 [n, 2]."""
    low = words[:, Word.SEED_LOW].long() & 0xFFFFFFFF
    high = words[:, Word.SEED_HIGH].long()
    seeds = low | (high << 32)
    mixed = _mix64(seeds + _signed(int(GOLDEN)))
    bits = _mix64(mixed ^ (words[:, Word.LENGTH].long() * _signed(int(STRIDE))))
    return bits.contiguous().view(torch.int32).view(-1, 2)


def _mix64(x: Tensor) -> Tensor:
    """Compute `counter_rng._mix64` of uint64 values stored as int64."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * _signed(factor)
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def _signed(bits: int) -> int:
    return bits - (1 << 64) if bits >> 63 else bits


def _append(
    tokens: Tensor, is_usable: Tensor, rows: RowState, index: Tensor, words: Tensor, answers: Tensor
) -> None:
    """Write the answers, and append the tokens, int64 [n], to rows that have not ended."""
    is_live = words[:, Word.ENDED] == 0
    is_sampled = is_live & is_usable
    length = words[:, Word.LENGTH] + is_sampled
    is_stop = (_is_given(rows.stop_ids, words) & (rows.stop_ids[index] == tokens[:, None])).any(-1)
    has_ended = is_sampled & (is_stop | (length >= words[:, Word.LIMIT]))
    is_unusable = is_live & ~is_usable
    flags = is_sampled * int(Flag.SAMPLED) + has_ended * int(Flag.ENDED) + is_unusable * int(Flag.UNUSABLE)
    answers.copy_(torch.stack((tokens.where(is_sampled, 0), flags), 1))
    updated = words.clone()
    updated[:, Word.LENGTH] = length
    updated[:, Word.LAST_TOKEN] = torch.where(is_sampled, tokens.int(), words[:, Word.LAST_TOKEN])
    updated[:, Word.ENDED] = (~is_live | has_ended | is_unusable).int()
    rows.words[index] = updated
    counts = rows.token_counts[index, tokens]
    is_counted = is_sampled & (counts & MAX_COUNT < MAX_COUNT)
    rows.token_counts[index, tokens] = counts + is_counted.to(counts.dtype)
