"""Computes token details on the device: the logprob, the rank, and the top tokens, like
`sampling.logprobs`.

The vocabulary is not sorted. The highest scores of groups of tokens limit the groups in which the top tokens
can be; the n-th highest score is searched among the tokens of these groups. Ranks and probability masses are
sums of integers, so they do not depend on the order of additions."""

import torch
import triton
from torch import Tensor

from tgis.shard.kernels.cuda.details.describe_kernels import DetailSizes, answer, sum_blocks
from tgis.shard.kernels.cuda.functions.filters import MAX_PROGRAMS, mass_scale
from tgis.shard.kernels.cuda.step_state import MAX_TOP_N, MAX_TOPS, DetailQuestions, DeviceDetails, Query
from tgis.shard.sampling.logprobs import MAX_TIES

NUM_GROUPS, GROUP = 8, 256  # groups per block, and tokens per group: 16 tokens per thread
NUM_WARPS, LIST_WARPS = 4, 8


def launch(questions: DetailQuestions, details: DeviceDetails) -> None:
    """Answer the questions that are asked. The lists of `details` must have room for MAX_TIES times the
    number of top tokens of each question, which is at most MAX_TOP_N.

    If a score is NaN, log-probabilities are NaN and there are no top tokens."""
    scores, queries = questions
    num_tokens, vocab_size = scores.shape
    assert scores.is_contiguous(), "rows are contiguous"
    if not num_tokens:
        return
    num_blocks = triton.cdiv(vocab_size, NUM_GROUPS * GROUP)
    sizes = DetailSizes(
        vocab_size,
        NUM_GROUPS,
        GROUP,
        num_blocks,
        triton.next_power_of_2(num_blocks),
        triton.next_power_of_2(num_blocks) * NUM_GROUPS,
        MAX_TOPS,
        triton.next_power_of_2(MAX_TOP_N),
        mass_scale(vocab_size),
    )

    def empty(width: int, dtype: torch.dtype) -> Tensor:
        return torch.empty((num_tokens, width), dtype=dtype, device=scores.device)

    peaks = empty(num_blocks * NUM_GROUPS, torch.float32)
    blocks = empty(num_blocks, torch.float32), empty(num_blocks, torch.int64), empty(num_blocks, torch.int32)
    grid = min(num_blocks, triton.cdiv(MAX_PROGRAMS, num_tokens)), num_tokens
    options = {"SIZES": sizes, "enable_fp_fusion": False}
    sum_blocks[grid](scores, queries, peaks, *blocks, num_warps=NUM_WARPS, **options)
    chosen = empty(MAX_TOPS, torch.int32)
    answers = *details, details.words.stride(0), details.logprobs.stride(0)
    answer[(num_tokens,)](scores, queries, peaks, *blocks, chosen, *answers, num_warps=LIST_WARPS, **options)


def plain(questions: DetailQuestions, details: DeviceDetails) -> None:
    scores, queries = questions
    vocab_size = scores.shape[1]
    is_asked = queries[:, Query.IS_ASKED, None] != 0
    # Questions that are not asked have undefined numbers.
    token_ids = queries[:, Query.TOKEN_ID, None].where(is_asked, 0).long()
    top_n = queries[:, Query.TOP_N, None].where(is_asked, 0).long()
    own = scores.gather(1, token_ids)
    logprobs = scores.log_softmax(-1)
    rank = 1 + (scores > own).sum(-1, keepdim=True)
    best = scores.topk(min(MAX_TOP_N, vocab_size)).values
    edge = best.gather(1, top_n.clamp(1, best.shape[1]) - 1)
    is_top = (scores >= edge) & (scores > -torch.inf) & ~logprobs.isnan() & (top_n > 0)
    place = is_top.cumsum(-1) - 1
    is_top &= place < MAX_TIES * top_n
    num_tops = is_top.sum(-1, keepdim=True)
    max_tops = details.logprobs.shape[1] - 1
    ids = torch.arange(vocab_size, device=scores.device).expand_as(scores)
    listed = _list(ids, is_top, place, max_tops)
    words = torch.cat((rank, num_tops, listed), 1).int()
    numbers = torch.cat((logprobs.gather(1, token_ids), logprobs.gather(1, listed)), 1)
    i = torch.arange(-1, max_tops, device=scores.device)
    is_written = is_asked & (i < num_tops)
    details.words.copy_(torch.where(torch.cat((is_asked, is_written), 1), words, details.words))
    details.logprobs.copy_(torch.where(is_written, numbers, details.logprobs))


def _list(ids: Tensor, is_top: Tensor, place: Tensor, max_tops: int) -> Tensor:
    """Return the ids [n, max_tops] of the tokens for which `is_top` [n, vocab_size] is True."""
    listed = torch.zeros((len(ids), max_tops + 1), dtype=torch.int64, device=ids.device)
    return listed.scatter_(1, place.where(is_top, max_tops).clamp(max=max_tops), ids)[:, :max_tops]
