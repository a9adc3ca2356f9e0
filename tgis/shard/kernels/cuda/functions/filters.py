"""Top-k, top-p and typical-p on a device: launches of the kernels that find their limits, and the twin that
sorts.

All ties at the k-th score stay, and of equal scores at the limit of top-p the lower ids, as on the CPU.
Masses are whole numbers, which every order of additions sums alike. They differ from the CPU's by what exp
and the division by the sum round."""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from tgis.shard.kernels.cuda.functions import filter_kernels, limit_kernels
from tgis.shard.kernels.cuda.step_state import Word, as_float

BLOCK, NUM_WARPS = 4096, 4  # tokens that a program counts at once: 32 of each thread
MAX_LISTED, LIST_WARPS = 8192, 8  # candidates of a sample; of more, the whole vocabulary is read again
MAX_PROGRAMS = 1024  # of a launch; they share the blocks of many samples
NUM_PIVOTS, NUM_LIMITS = int(filter_kernels.NUM_PIVOTS), int(filter_kernels.NUM_LIMITS)


class FilterSizes(NamedTuple):
    """Constants of the kernels. Peaks are the blocks of which `adjust` has written the highest score."""

    vocab_size: int
    num_peaks: int
    padded_peaks: int
    block: int
    num_blocks: int
    padded_blocks: int
    max_listed: int
    scale: float  # mass of the highest score


class FilterMemory(NamedTuple):
    """Results of n samples that the kernels pass on. Pivots and what is summed from them on are those of the
    whole vocabulary, then those of a part."""

    pivots: Tensor  # float32 [n, 2, NUM_PIVOTS]
    counts: Tensor  # int32 [n, 2, num_blocks, NUM_PIVOTS]
    masses: Tensor  # int64 [n, 2, num_blocks, NUM_PIVOTS]
    moments: Tensor  # int64 [n, num_blocks, 2]
    scores: Tensor  # float32 [n, max_listed], of candidates
    ids: Tensor  # int32 [n, max_listed]
    limits: Tensor  # int32 [n, NUM_LIMITS]


def mass_scale(vocab_size: int) -> float:
    """Return the mass of the highest score such that the sum of as many is below 2^62."""
    return 2.0 ** (62 - vocab_size.bit_length())


def find_limits(logits: Tensor, sampled_rows: Tensor, words: Tensor, highest: Tensor) -> Tensor:
    """Return what filters leave of each sample, int32 [n, NUM_LIMITS]; nothing that means anything for rows
    without. highest: float32 [n, number of blocks], the highest logit of each."""
    (num_samples, vocab_size), num_peaks = logits.shape, highest.shape[1]
    num_blocks = triton.cdiv(vocab_size, BLOCK)
    sizes = FilterSizes(
        vocab_size,
        num_peaks,
        triton.next_power_of_2(num_peaks),
        BLOCK,
        num_blocks,
        triton.next_power_of_2(num_blocks),
        MAX_LISTED,
        mass_scale(vocab_size),
    )
    memory = _allocate(logits, num_samples, num_blocks)
    given = logits, sampled_rows, words, highest, memory, sizes
    grid = min(num_blocks, triton.cdiv(MAX_PROGRAMS, num_samples)), num_samples
    options = {"num_warps": NUM_WARPS, "enable_fp_fusion": False}
    for typical in (False, True):
        if typical:
            filter_kernels.sum_moments[grid](*given, **options)
        for is_second in (0, 1):
            filter_kernels.sum_above_pivots[grid](*given, IS_SECOND=is_second, TYPICAL=typical, **options)
        listing = {"TYPICAL": typical, "num_warps": LIST_WARPS, "enable_fp_fusion": False}
        limit_kernels.list_candidates[grid](*given, **listing)
        limit_kernels.find_limits[(num_samples,)](*given, **listing)
    return memory.limits


def _allocate(logits: Tensor, num_samples: int, num_blocks: int) -> FilterMemory:
    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty((num_samples, *shape), dtype=dtype, device=logits.device)

    return FilterMemory(
        pivots=empty(2, NUM_PIVOTS, dtype=torch.float32),
        counts=empty(2, num_blocks, NUM_PIVOTS),
        masses=empty(2, num_blocks, NUM_PIVOTS, dtype=torch.int64),
        moments=empty(num_blocks, 2, dtype=torch.int64),
        scores=empty(MAX_LISTED, dtype=torch.float32),
        ids=empty(MAX_LISTED),
        limits=empty(NUM_LIMITS),
    )


def filter_sorted(scores: Tensor, highest: Tensor, words: Tensor) -> None:
    """Set scores that filters leave out to -inf, in place. scores [n, vocab_size] have no NaN."""
    top = highest.nan_to_num(0.0, 0.0, 0.0)[:, None]
    scores.masked_fill_(~_find_best(scores, top, words), -torch.inf)
    min_p = as_float(words[:, Word.MIN_P])[:, None]
    scores.masked_fill_((min_p > 0) & (scores < top + min_p.log()), -torch.inf)
    scores.masked_fill_(~_find_typical(scores, top, words), -torch.inf)


def _find_best(scores: Tensor, top: Tensor, words: Tensor) -> Tensor:
    """Return bool [n, vocab_size], True for the tokens that top-k and top-p leave."""
    vocab_size = scores.shape[1]
    best, ids = scores.sort(dim=-1, descending=True, stable=True)
    top_k = words[:, Word.TOP_K, None].long()
    has_k = (top_k > 0) & (top_k < vocab_size)
    kept = ~has_k | (best >= best.gather(1, top_k.clamp(1, vocab_size) - 1))
    masses = _count_masses(best, top, vocab_size).where(kept, 0)
    top_p = as_float(words[:, Word.TOP_P])[:, None]
    wanted = _find_share(top_p, masses.sum(-1, keepdim=True))
    kept &= (top_p >= 1) | (masses.cumsum(-1) - masses < wanted)
    return torch.zeros_like(kept).scatter_(1, ids, kept)


def _find_typical(scores: Tensor, top: Tensor, words: Tensor) -> Tensor:
    """Return bool [n, vocab_size], True for the tokens that typical-p leaves."""
    vocab_size = scores.shape[1]
    scale = mass_scale(vocab_size)
    kept = scores > -torch.inf
    weights = (scores - top).exp()
    distances = torch.where(weights > 0, top - scores, 0.0)
    masses = (weights * scale).long().where(kept, 0)
    moments = (weights * distances * scale).long().where(kept, 0)
    moment, mass = (each.sum(-1, keepdim=True).double() for each in (moments, masses))
    centre = -(moment / mass).float()
    typicality = torch.where(kept, -((scores - top) - centre).abs(), -torch.inf)
    ranked, ids = typicality.sort(dim=-1, descending=True, stable=True)
    sorted_masses = masses.gather(1, ids)
    typical_p = as_float(words[:, Word.TYPICAL_P])[:, None]
    wanted = _find_share(typical_p, sorted_masses.sum(-1, keepdim=True))
    place = (sorted_masses.cumsum(-1) < wanted).sum(-1, keepdim=True).clamp(max=vocab_size - 1)
    return (typical_p >= 1) | (typicality >= ranked.gather(1, place))


def _count_masses(scores: Tensor, top: Tensor, vocab_size: int) -> Tensor:
    return ((scores - top).exp() * mass_scale(vocab_size)).long()


def _find_share(share: Tensor, total: Tensor) -> Tensor:
    return (share.double() * total.double()).long().clamp(min=1)
