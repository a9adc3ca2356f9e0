"""Top-k, top-p and typical-p: which tokens sampled rows may choose from. Few candidates mostly decide; where
they cannot, vocabularies are sorted, but not on a CPU, where that takes longer than a model's step, and the
edge is searched for. A row's result never depends on the rows beside it."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

# Candidates tried, in turn, before the whole vocabulary.
WIDTHS = (64, 1024, 8192)
# What an edge is searched for in, and how far they reach, in nats; what is beyond shares one.
NUM_BINS, REACH = 4096, 24.0


@dataclass(frozen=True)
class Limits:
    """Of n rows: top_k int64 (0: off), top_p and typical_p float32 (1: off)."""

    top_k: npt.NDArray[np.int64]
    top_p: npt.NDArray[np.float32]
    typical_p: npt.NDArray[np.float32]

    def take(self, rows: npt.NDArray[np.int64]) -> "Limits":
        return Limits(self.top_k[rows], self.top_p[rows], self.typical_p[rows])


@dataclass(frozen=True)
class Candidates:
    """What is left of n rows: their indices `rows` [n]; scores float32 [n, width], -inf where excluded; the
    token ids int64 [n, width]."""

    rows: npt.NDArray[np.int64]
    scores: Tensor
    token_ids: Tensor

    def take(self, index: npt.NDArray[np.int64]) -> "Candidates":
        if len(index) == len(self.rows):
            return self
        part = torch.from_numpy(index)
        return Candidates(self.rows[index], self.scores[part], self.token_ids[part])


def narrow(scores: Tensor, limits: Limits) -> Iterator[Candidates]:
    """Every row of scores [n, vocab_size] once, in groups of equal width; each has a top_k or a top_p.

    Ties at the k-th score all stay; of equals at the edge of top_p the lower ids stay."""
    vocab_size = scores.shape[-1]
    pending = np.arange(len(scores))
    for width in sorted({min(width, vocab_size) for width in (*WIDTHS, vocab_size)}):
        # One column beyond the k-th tells whether equals of it lie outside.
        fitting = (limits.top_k[pending] < width) | (width == vocab_size)
        rows, pending = pending[fitting], pending[~fitting]
        if len(rows) == 0:
            continue
        found, certain = _narrow(scores, rows, limits.take(rows), width)
        if certain.any():
            found = found.take(certain.nonzero()[0])
            _limit_typical(found.scores, limits.typical_p[found.rows])
            yield found
        pending = np.sort(np.concatenate([pending, rows[~certain]]))
        is_open = limits.top_k[pending] == 0
        if scores.is_cpu and is_open.any():
            yield _cut(scores, pending[is_open], limits)
            pending = pending[~is_open]
        if len(pending) == 0:
            return


def _narrow(
    scores: Tensor, rows: npt.NDArray[np.int64], limits: Limits, width: int
) -> tuple[Candidates, npt.NDArray[np.bool_]]:
    """The best `width` tokens of `rows`, rising, cut to top_k and top_p; where [n] none is missing."""
    scores = scores if len(rows) == len(scores) else scores[torch.from_numpy(rows)]
    best, token_ids = _rank(scores, width)
    kept = best.clone()  # [n, width]
    has_k = torch.from_numpy(limits.top_k > 0).to(best.device).unsqueeze(-1)  # [n, 1]
    last = torch.from_numpy(np.clip(limits.top_k, 1, width) - 1).to(best.device).unsqueeze(-1)
    edge = best.gather(-1, last)  # [n, 1], the k-th score
    if limits.top_k.any():
        kept.masked_fill_((best < edge) & has_k, -torch.inf)
    if (limits.top_p < 1).any():
        mass = _probabilities(scores, kept, token_ids, has_k).cumsum(-1)
        top_p = torch.from_numpy(np.where(limits.top_p < 1, limits.top_p, np.float32(np.inf)))
        # A token stays where the mass before it falls short; so the first always does.
        kept[:, 1:].masked_fill_(mass[:, :-1] >= top_p.to(best.device).unsqueeze(-1), -torch.inf)
    lowest = kept.masked_fill(kept == -torch.inf, torch.inf).amin(-1, keepdim=True)
    # Ties of the k-th have a share in the mass that top_p divides, so all of them must be here.
    certain = torch.where(has_k, edge, lowest).squeeze(-1) > best[:, -1]
    return Candidates(rows, kept, token_ids), certain.numpy(force=True) | (width == scores.shape[-1])


def _cut(scores: Tensor, rows: npt.NDArray[np.int64], limits: Limits) -> Candidates:
    """All tokens of `rows`, cut to top_p."""
    limits = limits.take(rows)
    scores = scores[torch.from_numpy(rows)]  # [n, vocab_size]
    probabilities = scores.softmax(-1).numpy()
    for i in (limits.top_p < 1).nonzero()[0].tolist():
        _cut_row(scores[i].numpy(), probabilities[i], limits.top_p[i])
    _limit_typical(scores, limits.typical_p)
    return Candidates(rows, scores, torch.arange(scores.shape[-1]).expand_as(scores))


def _cut_row(scores: npt.NDArray[np.float32], weights: npt.NDArray[np.float32], top_p: np.float32) -> None:
    """In place, [vocab_size]."""
    edge, before = _find_edge(-scores, weights, top_p, -scores.max())
    ties = np.flatnonzero(scores == -edge)
    scores[scores < -edge] = -np.inf
    scores[ties[before + weights[ties].astype(np.float64).cumsum() - weights[ties] >= top_p]] = -np.inf


def _find_edge(
    keys: npt.NDArray[np.float32],
    weights: npt.NDArray[np.float32],
    mass: np.float32,
    least: np.float32,
) -> tuple[np.float32, np.float64]:
    """The key at which the weights [width] of all that are not higher reach the mass, and the weights of all
    that are lower; the highest where they never do. No key is lower than `least`."""
    with np.errstate(invalid="ignore"):  # a row of which nothing can be chosen has no least
        bins = (np.fmin(keys - least, np.float32(REACH)) * np.float32(NUM_BINS / REACH)).astype(np.int32)
    total = np.bincount(bins, weights, NUM_BINS + 1).cumsum()
    found = min(int(np.searchsorted(total, mass)), int(bins.max()))
    inside = np.flatnonzero(bins == found)
    inside = inside[np.argsort(keys[inside], kind="stable")]
    lower = total[found - 1] if found else np.float64(0)
    total = lower + weights[inside].astype(np.float64).cumsum()
    edge = keys[inside[min(int(np.searchsorted(total, mass)), len(inside) - 1)]]
    first = int(np.searchsorted(keys[inside], edge))
    return edge, total[first - 1] if first else lower


def _rank(scores: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The highest scores of each row and their ids, [n, width] each: falling, equals by rising id."""
    if width == scores.shape[-1]:
        best, token_ids = scores.sort(dim=-1, descending=True, stable=True)
        return best, token_ids
    token_ids = scores.topk(width, sorted=False).indices.sort(-1).values
    best, order = scores.gather(-1, token_ids).sort(dim=-1, descending=True, stable=True)
    return best, token_ids.gather(-1, order)


def _probabilities(scores: Tensor, kept: Tensor, token_ids: Tensor, has_k: Tensor) -> Tensor:
    """[n, width], of all tokens, or of those that top_k left.

    Softmax and cumulative sums add row by row; a plain sum may be split over threads when a row is alone."""
    among_kept = kept.softmax(-1)
    if bool(has_k.all()):
        return among_kept
    return torch.where(has_k, among_kept, scores.softmax(-1).gather(-1, token_ids))


def _limit_typical(scores: Tensor, typical_p: npt.NDArray[np.float32]) -> None:
    rows = (typical_p < 1).nonzero()[0]
    if len(rows):
        index = torch.from_numpy(rows)
        scores[index] = keep_typical(scores[index], typical_p[rows])


def keep_typical(scores: Tensor, typical_p: npt.NDArray[np.float32]) -> Tensor:
    """Scores [n, width] of the tokens whose information is nearest the entropy, -inf elsewhere.

    A token stays where those strictly nearer have less than the mass typical_p [n] together."""
    logprobs = scores.log_softmax(-1)
    probabilities = logprobs.exp()
    entropy = torch.special.entr(probabilities).cumsum(-1)[:, -1:]  # [n, 1]
    distance = (logprobs + entropy).abs_()  # [n, width], inf where excluded
    mass = torch.from_numpy(typical_p).to(scores.device).unsqueeze(-1)
    return scores.masked_fill(distance > _typical_edge(distance, probabilities, mass), -torch.inf)


def _typical_edge(distance: Tensor, probabilities: Tensor, mass: Tensor) -> Tensor:
    """The distance [n, 1] at which the mass is reached, however many candidates it takes to tell."""
    size = distance.shape[-1]
    if distance.is_cpu and size > WIDTHS[0]:
        rows = zip(distance.numpy(), probabilities.numpy(), mass.squeeze(-1).numpy(), strict=True)
        return torch.from_numpy(np.array([[_find_edge(*row, np.float32(0))[0]] for row in rows]))
    for width in (*(width for width in WIDTHS if width < size), size):
        nearest, columns = distance.topk(width, largest=False)  # rising
        short = probabilities.gather(-1, columns).cumsum(-1) < mass
        if width == size or not bool(short[:, -1].any()):
            break
    return nearest.gather(-1, short.sum(-1, keepdim=True).clamp_(max=width - 1))
