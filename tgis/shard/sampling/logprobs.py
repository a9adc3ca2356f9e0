"""Computes token details: the logprob, the rank, and the top tokens, including ties."""

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

# A list of top tokens has at most this times as many tokens as requested, if scores are equal.
MAX_TIES = 4


@dataclass(frozen=True)
class InputSpan:
    """Prompt tokens of a row that a step reports. Token 0 has no predecessor and therefore no details."""

    row: int
    start: int  # position
    token_ids: npt.NDArray[np.int32]  # [count]
    first_x: int  # index in [num_tokens] of the model's output that scores the first token with details


@dataclass(frozen=True)
class TokenDetails:
    """Details of n tokens. The top tokens of all n are concatenated; each list is sorted by descending
    logprob, then ascending id."""

    logprobs: npt.NDArray[np.float32]  # [n]
    ranks: npt.NDArray[np.int32]  # [n], 1 + the number of strictly higher scores
    top_counts: npt.NDArray[np.int32]  # [n]
    top_ids: npt.NDArray[np.int32]  # [sum of top_counts]
    top_logprobs: npt.NDArray[np.float32]  # [sum of top_counts]

    def take(self, index: npt.NDArray[np.int64]) -> "TokenDetails":
        """Return the details of the tokens at `index`, in that order."""
        counts = self.top_counts[index]
        begins = (self.top_counts.cumsum() - self.top_counts)[index]
        tops = np.repeat(begins - (counts.cumsum() - counts), counts) + np.arange(counts.sum())
        return TokenDetails(
            self.logprobs[index], self.ranks[index], counts, self.top_ids[tops], self.top_logprobs[tops]
        )


def blank_details(num_tokens: int) -> TokenDetails:
    """Return details for tokens without logits: logprob NaN, rank 0, no top tokens."""
    none = np.zeros(num_tokens, np.int32)
    return TokenDetails(
        np.full(num_tokens, np.nan, np.float32), none, none, none[:0], np.empty(0, np.float32)
    )


def concatenate(parts: list[TokenDetails]) -> TokenDetails:
    return TokenDetails(
        *(np.concatenate([vars(part)[f.name] for part in parts]) for f in fields(TokenDetails))
    )


def compute_details(scores: Tensor, token_ids: Tensor, top_n: npt.NDArray[np.int64]) -> TokenDetails:
    """Compute the details of tokens int64 [n] under softmax(scores).

    scores [n, vocab_size] are -inf where excluded; top_n [n] may be 0."""
    logprobs = scores.log_softmax(-1)
    index = token_ids.unsqueeze(-1)  # [n, 1]
    ranks = (scores > scores.gather(-1, index)).sum(-1, dtype=torch.int32) + 1
    rows, ids = _find_best(scores, top_n)
    best = logprobs[torch.from_numpy(rows), torch.from_numpy(ids)].numpy(force=True)
    order = np.lexsort((ids, -best, rows))
    return TokenDetails(
        logprobs=logprobs.gather(-1, index).squeeze(-1).numpy(force=True),
        ranks=ranks.numpy(force=True),
        top_counts=np.bincount(rows, minlength=len(top_n)).astype(np.int32),
        top_ids=ids[order].astype(np.int32),
        top_logprobs=best[order],
    )


def _find_best(
    scores: Tensor, top_n: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the rows and ids, ascending, of scores not below the n-th highest of a row, at most
    MAX_TIES * n per row."""
    if not top_n.any():
        return np.empty(0, np.int64), np.empty(0, np.int64)
    last = np.clip(top_n, 1, scores.shape[-1]) - 1  # [n]
    best = scores.topk(int(last.max()) + 1).values
    edge = best.gather(-1, torch.from_numpy(last).to(best.device).unsqueeze(-1))  # [n, 1]
    edge.masked_fill_(torch.from_numpy(top_n == 0).to(best.device).unsqueeze(-1), torch.inf)
    matches = ((scores >= edge) & (scores > -torch.inf)).nonzero().numpy(force=True)
    rows = matches[:, 0]
    ids = matches[:, 1]
    index_in_row = np.arange(len(rows)) - np.searchsorted(rows, rows)
    inside = index_in_row < MAX_TIES * top_n[rows]
    return rows[inside], ids[inside]
