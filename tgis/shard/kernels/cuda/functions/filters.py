"""Top-k, top-p and typical-p on a device: launches of the kernels that find their limits, and the twin, which
sorts.

As on the CPU, all ties at the k-th score are kept, and of equal scores at the limit of top-p the lower ids
are kept. Masses are integers, so their sums do not depend on the order. They differ from the CPU's by the
rounding of exp and of the normalisation."""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from tgis.shard.kernels.cuda.functions import filter_kernels, limit_kernels
from tgis.shard.kernels.cuda.step_state import Word, as_float

BLOCK, NUM_WARPS = 4096, 4  # 32 tokens per thread
MAX_LISTED, LIST_WARPS = 8192, 8  # maximum listed candidates; with more, the whole vocabulary is read again
MAX_PROGRAMS = 1024  # programs per launch, which share the blocks of all samples
NUM_PIVOTS, NUM_LIMITS = int(filter_kernels.NUM_PIVOTS), int(filter_kernels.NUM_LIMITS)


class FilterSizes(NamedTuple):
    """Constants of the kernels. Peaks are the blocks whose highest scores `adjust` has written."""

    vocab_size: int
    num_peaks: int
    padded_peaks: int
    block: int
    num_blocks: int
    padded_blocks: int
    max_listed: int
    scale: float  # mass of a token with the highest score


class FilterMemory(NamedTuple):
    """Intermediate results for n samples. Index 0 of axis 1 is for pivots of the whole vocabulary, index 1
    for pivots of a part."""

    pivots: Tensor  # float32 [n, 2, NUM_PIVOTS]
    counts: Tensor  # int32 [n, 2, num_blocks, NUM_PIVOTS]
    masses: Tensor  # int64 [n, 2, num_blocks, NUM_PIVOTS]
    moments: Tensor  # int64 [n, num_blocks, 2]
    scores: Tensor  # float32 [n, max_listed], scores of candidates
    ids: Tensor  # int32 [n, max_listed]
    limits: Tensor  # int32 [n, NUM_LIMITS]


def mass_scale(vocab_size: int) -> float:
    """Return the mass of the highest score. The sum of `vocab_size` such masses is below 2^62."""
    return 2.0 ** (62 - vocab_size.bit_length())


def find_limits(logits: Tensor, sampled_rows: Tensor, words: Tensor, highest: Tensor) -> Tensor:
    """Return the limits of each sample, int32 [n, NUM_LIMITS]. Those of rows without filters are undefined.
    highest: float32 [n, num_peaks], the highest logit of each block."""
    num_samples, vocab_size = logits.shape
    num_peaks = highest.shape[1]
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
    inputs = logits, sampled_rows, words, highest, memory, sizes
    grid = min(num_blocks, triton.cdiv(MAX_PROGRAMS, num_samples)), num_samples
    options = {"num_warps": NUM_WARPS, "enable_fp_fusion": False}
    for typical in (False, True):
        if typical:
            filter_kernels.sum_moments[grid](*inputs, **options)
        for is_second in (0, 1):
            filter_kernels.sum_above_pivots[grid](*inputs, IS_SECOND=is_second, TYPICAL=typical, **options)
        listing = {"TYPICAL": typical, "num_warps": LIST_WARPS, "enable_fp_fusion": False}
        limit_kernels.list_candidates[grid](*inputs, **listing)
        limit_kernels.find_limits[(num_samples,)](*inputs, **listing)
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
    """Set scores of filtered-out tokens to -inf in place. scores: [n, vocab_size] without NaN."""
    top = highest.nan_to_num(0.0, 0.0, 0.0)[:, None]
    scores.masked_fill_(~_find_best(scores, top, words), -torch.inf)
    min_p = as_float(words[:, Word["MIN_P"]])[:, None]
    scores.masked_fill_((min_p > 0) & (scores < top + min_p.log()), -torch.inf)
    scores.masked_fill_(~_find_typical(scores, top, words), -torch.inf)


def _find_best(scores: Tensor, top: Tensor, words: Tensor) -> Tensor:
    """Return bool [n, vocab_size], True for tokens that top-k and top-p keep."""
    vocab_size = scores.shape[1]
    best, ids = scores.sort(dim=-1, descending=True, stable=True)
    top_k = words[:, Word["TOP_K"], None].long()
    has_k = (top_k > 0) & (top_k < vocab_size)
    kept = ~has_k | (best >= best.gather(1, top_k.clamp(1, vocab_size) - 1))
    masses = _count_masses(best, top, vocab_size).where(kept, 0)
    top_p = as_float(words[:, Word["TOP_P"]])[:, None]
    min_mass = _find_share(top_p, masses.sum(-1, keepdim=True))
    kept &= (top_p >= 1) | (masses.cumsum(-1) - masses < min_mass)
    return torch.zeros_like(kept).scatter_(1, ids, kept)


def _find_typical(scores: Tensor, top: Tensor, words: Tensor) -> Tensor:
    """Return bool [n, vocab_size], True for tokens that typical-p keeps."""
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
    typical_p = as_float(words[:, Word["TYPICAL_P"]])[:, None]
    min_mass = _find_share(typical_p, sorted_masses.sum(-1, keepdim=True))
    place = (sorted_masses.cumsum(-1) < min_mass).sum(-1, keepdim=True).clamp(max=vocab_size - 1)
    return (typical_p >= 1) | (typicality >= ranked.gather(1, place))


def _count_masses(scores: Tensor, top: Tensor, vocab_size: int) -> Tensor:
    return ((scores - top).exp() * mass_scale(vocab_size)).long()


def _find_share(share: Tensor, total: Tensor) -> Tensor:
    return (share.double() * total.double()).long().clamp(min=1)
