"""Top-k, top-p, min-p and typical-p filters. They limit the tokens that a row can sample, in this order,
which is the order of transformers.

Usually a few of the best candidates suffice. Otherwise the whole vocabulary is sorted. On a CPU, where a sort
can take longer than a step of the model, the threshold score is searched instead. A row's result never
depends on other rows."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

# Numbers of best candidates to try, in this order, before the whole vocabulary.
WIDTHS = (64, 1024, 8192)
# Number of histogram bins for the threshold search, and the range that they cover, in nats. Values beyond the
# range share one more bin.
NUM_BINS = 4096
BIN_RANGE = 24.0


@dataclass(frozen=True)
class Candidates:
    """Remaining tokens of n rows after filtering."""

    rows: npt.NDArray[np.int64]  # [n], indices
    scores: Tensor  # float32 [n, width], -inf where excluded
    token_ids: Tensor  # int64 [n, width]

    def take(self, index: npt.NDArray[np.int64]) -> "Candidates":
        if len(index) == len(self.rows):
            return self
        part = torch.from_numpy(index)
        return Candidates(self.rows[index], self.scores[part], self.token_ids[part])


def filter_candidates(scores: Tensor, params: npt.NDArray[np.void]) -> Iterator[Candidates]:
    """Yield the candidates of every row of scores [n, vocab_size] once, in groups of equal width.

    `params` is ROW_PARAMETERS [n]. Each row must have a top_k below vocab_size, or a top_p. All scores equal
    to the k-th score are kept; among equal scores at the top_p limit, lower ids are preferred."""
    vocab_size = scores.shape[-1]
    pending = np.arange(len(scores))
    for width in sorted({min(width, vocab_size) for width in (*WIDTHS, vocab_size)}):
        # One column after the k-th is needed to detect further scores equal to the k-th.
        fitting = (params["top_k"][pending] < width) | (width == vocab_size)
        rows = pending[fitting]
        pending = pending[~fitting]
        if len(rows) == 0:
            continue
        candidates, is_final = _filter_top(scores, rows, params[rows], width)
        if is_final.any():
            candidates = candidates.take(is_final.nonzero()[0])
            filter_rest(candidates.scores, params[candidates.rows])
            yield candidates
        pending = np.sort(np.concatenate([pending, rows[~is_final]]))
        is_open = params["top_k"][pending] == 0
        if scores.is_cpu and is_open.any():
            yield _filter_all(scores, pending[is_open], params)
            pending = pending[~is_open]
        if len(pending) == 0:
            return


def _filter_top(
    scores: Tensor, rows: npt.NDArray[np.int64], params: npt.NDArray[np.void], width: int
) -> tuple[Candidates, npt.NDArray[np.bool_]]:
    """Return the best `width` tokens of sorted `rows`, limited to top_k and top_p, and bool [n], True where
    no further token belongs to the result."""
    scores = scores if len(rows) == len(scores) else scores[torch.from_numpy(rows)]
    best, token_ids = _take_best(scores, width)
    kept = best.clone()  # [n, width]
    has_k = torch.from_numpy(params["top_k"] > 0).to(best.device).unsqueeze(-1)  # [n, 1]
    last = torch.from_numpy(np.clip(params["top_k"], 1, width) - 1).to(best.device).unsqueeze(-1)
    threshold = best.gather(-1, last)  # [n, 1], the k-th score
    if params["top_k"].any():
        kept.masked_fill_((best < threshold) & has_k, -torch.inf)
    if (params["top_p"] < 1).any():
        mass = _probabilities(scores, kept, token_ids, has_k).cumsum(-1)
        top_p = torch.from_numpy(np.where(params["top_p"] < 1, params["top_p"], np.float32(np.inf)))
        # A token is kept if the mass before it is less than top_p, so the first one is always kept.
        kept[:, 1:].masked_fill_(mass[:, :-1] >= top_p.to(best.device).unsqueeze(-1), -torch.inf)
    lowest = kept.masked_fill(kept == -torch.inf, torch.inf).amin(-1, keepdim=True)
    # Scores equal to the k-th are part of the mass to which top_p applies, so all of them must be present.
    is_final = torch.where(has_k, threshold, lowest).squeeze(-1) > best[:, -1]
    return Candidates(rows, kept, token_ids), is_final.numpy(force=True) | (width == scores.shape[-1])


def _filter_all(scores: Tensor, rows: npt.NDArray[np.int64], params: npt.NDArray[np.void]) -> Candidates:
    params = params[rows]
    scores = scores[torch.from_numpy(rows)]  # [n, vocab_size]
    probabilities = scores.softmax(-1).numpy()
    for i in (params["top_p"] < 1).nonzero()[0].tolist():
        _filter_row(scores[i].numpy(), probabilities[i], params["top_p"][i])
    filter_rest(scores, params)
    return Candidates(rows, scores, torch.arange(scores.shape[-1]).expand_as(scores))


def _filter_row(scores: npt.NDArray[np.float32], weights: npt.NDArray[np.float32], top_p: np.float32) -> None:
    """Limit the scores of one row, [vocab_size], to top_p, in place."""
    threshold, before = _find_threshold(-scores, weights, top_p, -scores.max())
    ties = np.flatnonzero(scores == -threshold)
    scores[scores < -threshold] = -np.inf
    scores[ties[before + weights[ties].astype(np.float64).cumsum() - weights[ties] >= top_p]] = -np.inf


def _find_threshold(
    keys: npt.NDArray[np.float32],
    weights: npt.NDArray[np.float32],
    mass: np.float32,
    lowest: np.float32,
) -> tuple[np.float32, np.float64]:
    """Find the lowest key such that the weights of all keys up to it sum to `mass`, or else the highest key.

    Return it and the sum of the weights of all lower keys. keys and weights are [width]; `lowest` is a lower
    bound of the keys."""
    with np.errstate(invalid="ignore"):  # `lowest` is not finite in a row without a finite score
        scaled = np.fmin(keys - lowest, np.float32(BIN_RANGE)) * np.float32(NUM_BINS / BIN_RANGE)
        bins = scaled.astype(np.int32)
    total = np.bincount(bins, weights, NUM_BINS + 1).cumsum()
    chosen = min(int(np.searchsorted(total, mass)), int(bins.max()))
    inside = np.flatnonzero(bins == chosen)
    inside = inside[np.argsort(keys[inside], kind="stable")]
    lower = total[chosen - 1] if chosen else np.float64(0)
    total = lower + weights[inside].astype(np.float64).cumsum()
    threshold = keys[inside[min(int(np.searchsorted(total, mass)), len(inside) - 1)]]
    first = int(np.searchsorted(keys[inside], threshold))
    return threshold, total[first - 1] if first else lower


def _take_best(scores: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return the highest scores and their ids, [n, width] each, by descending score, then ascending id."""
    if width == scores.shape[-1]:
        best, token_ids = scores.sort(dim=-1, descending=True, stable=True)
        return best, token_ids
    token_ids = scores.topk(width, sorted=False).indices.sort(-1).values
    best, order = scores.gather(-1, token_ids).sort(dim=-1, descending=True, stable=True)
    return best, token_ids.gather(-1, order)


def _probabilities(scores: Tensor, kept: Tensor, token_ids: Tensor, has_k: Tensor) -> Tensor:
    """Return the probabilities [n, width] relative to all tokens, or to the tokens kept by top_k if
    `has_k`."""
    # This must not be a plain sum, which torch may split over threads for a single row. Softmax does not.
    among_kept = kept.softmax(-1)
    if bool(has_k.all()):
        return among_kept
    return torch.where(has_k, among_kept, scores.softmax(-1).gather(-1, token_ids))


def filter_rest(
    scores: Tensor, params: npt.NDArray[np.void], among: npt.NDArray[np.bool_] | np.bool_ = np.True_
) -> None:
    """Apply min_p and typical_p to the rows `among` [n] of scores [n, width], in place."""
    _filter_rows(scores, params["min_p"], among & (params["min_p"] > 0), _filter_min)
    _filter_rows(scores, params["typical_p"], among & (params["typical_p"] < 1), _filter_typical)


def _filter_rows(
    scores: Tensor,
    limits: npt.NDArray[np.float32],
    selected: npt.NDArray[np.bool_],
    apply: Callable[[Tensor, npt.NDArray[np.float32]], Tensor],
) -> None:
    rows = selected.nonzero()[0]
    if len(rows):
        index = torch.from_numpy(rows)
        scores[index] = apply(scores if len(rows) == len(scores) else scores[index], limits[rows])


def _filter_min(scores: Tensor, min_p: npt.NDArray[np.float32]) -> Tensor:
    """Set the scores [n, width] of tokens with less than min_p [n] of the highest probability to -inf."""
    ratio = torch.from_numpy(min_p).to(scores.device).log().unsqueeze(-1)  # [n, 1]
    return scores.masked_fill(scores < scores.amax(-1, keepdim=True) + ratio, -torch.inf)


def _filter_typical(scores: Tensor, typical_p: npt.NDArray[np.float32]) -> Tensor:
    """Set the scores [n, width] of tokens whose information content is far from the entropy to -inf.

    A token is kept if all strictly nearer tokens together have less than the probability typical_p [n]."""
    logprobs = scores.log_softmax(-1)
    probabilities = logprobs.exp()
    entropy = torch.special.entr(probabilities).cumsum(-1)[:, -1:]  # [n, 1]
    distance = (logprobs + entropy).abs_()  # [n, width], inf where excluded
    # The contract allows negative values, but the mass must be positive.
    positive = typical_p.clip(np.finfo(np.float32).tiny)
    mass = torch.from_numpy(positive).to(scores.device).unsqueeze(-1)
    return scores.masked_fill(distance > _find_typical_threshold(distance, probabilities, mass), -torch.inf)


def _find_typical_threshold(distance: Tensor, probabilities: Tensor, mass: Tensor) -> Tensor:
    """Return the distance [n, 1] at which the mass is reached."""
    size = distance.shape[-1]
    if distance.is_cpu and size > WIDTHS[0]:
        rows = zip(distance.numpy(), probabilities.numpy(), mass.squeeze(-1).numpy(), strict=True)
        return torch.from_numpy(np.array([[_find_threshold(*row, np.float32(0))[0]] for row in rows]))
    for width in (*(width for width in WIDTHS if width < size), size):
        nearest, columns = distance.topk(width, largest=False)  # ascending
        short = probabilities.gather(-1, columns).cumsum(-1) < mass
        if width == size or not bool(short[:, -1].any()):
            break
    return nearest.gather(-1, short.sum(-1, keepdim=True).clamp_(max=width - 1))
