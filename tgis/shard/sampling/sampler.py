"""Samples tokens: modifies the logits, filters the candidates and draws one of them.

A row's token depends only on its own logits, token ids, parameters and seed. The order is:

1. the logit bias,
2. the watermark,
3. `min_new_tokens`, or once it is reached, the length penalty,
4. the repetition penalty,
5. the presence and frequency penalties,
6. the temperature,
7. `top_k`, `top_p`, `min_p` and `typical_p`, in this order (`logits_filters`),
8. a random draw, or the highest score in greedy rows.

TGIS's contract fixes the order of 3, 4 and 6 to 8. A grammar's mask is applied before `sample`: no step
allows a masked token again."""

from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tgis.pb import shard_pb2 as pb
from tgis.sampling_parameters import PARAMETERS, Parameter
from tgis.shard.sampling.counter_rng import draw_columns, draw_keys
from tgis.shard.sampling.logits_filters import filter_candidates, filter_rest
from tgis.shard.sampling.watermark import green_tokens

# Record type of the sampling parameters of one row.
ROW_PARAMETERS = np.dtype([(each.name, each.dtype) for each in PARAMETERS])
# Penalties are clamped to this and its inverse, so that the product of a logit and two penalties is finite.
MAX_FACTOR = np.float32(1e16)


class LogitBias(NamedTuple):
    """Biases that are added to logits of [n, vocab_size], at most one per logit."""

    rows: Tensor  # int64 [num_biases], indices in [n]
    token_ids: Tensor  # int64 [num_biases]
    biases: Tensor  # float32 [num_biases]

    @classmethod
    def pack(
        cls, token_ids: npt.NDArray[np.int32], biases: npt.NDArray[np.float32], device: torch.device
    ) -> Self | None:
        """Pack the biases of n rows, [n, any], padded with token id -1. Return None if there are none."""
        rows, columns = (token_ids >= 0).nonzero()
        parts = (rows, token_ids[rows, columns].astype(np.int64), biases[rows, columns])
        return cls(*(torch.from_numpy(part).to(device) for part in parts)) if len(rows) else None


class Modifiers(NamedTuple):
    """Modifications of the logits that some row of a batch may need, so that the others cost nothing."""

    watermark: bool = True
    length_penalty: bool = True
    repetition_penalty: bool = True
    counted_penalties: bool = True
    """True if a row has a presence or frequency penalty."""

    @classmethod
    def of(cls, params: npt.NDArray[np.void]) -> Self:
        return cls(
            bool((params["watermark_gamma"] > 0).any()),
            bool((params["length_penalty_factor"] != 1).any()),
            bool((params["repetition_penalty"] != 1).any()),
            bool(((params["presence_penalty"] != 0) | (params["frequency_penalty"] != 0)).any()),
        )


_ANY_MODIFIERS = Modifiers()


@dataclass(frozen=True)
class SamplingBatch:
    """Inputs for sampling n tokens, other than the logits."""

    rows: npt.NDArray[np.int64]  # [n], indices into `token_ids` and `SeenTokens`
    params: npt.NDArray[np.void]  # ROW_PARAMETERS [n]
    num_generated: npt.NDArray[np.int64]  # [n], before this token
    positions: npt.NDArray[np.int64]  # [n], of this token in its sequence
    token_ids: npt.NDArray[np.int32]  # [max_rows, any], starting with the tokens of the row's sequence
    eos_token_ids: npt.NDArray[np.int32]  # [n, any], padded with -1
    wants_details: npt.NDArray[np.bool_]  # [n], True if the final scores are needed for token details
    must_end: npt.NDArray[np.bool_] | np.bool_ = np.False_  # [n], the grammar allows only EOS
    bias: LogitBias | None = None
    is_plain: bool = False  # True if all rows are plain
    modifiers: Modifiers = _ANY_MODIFIERS


class SeenTokens:
    """Token ids seen by each row with a repetition penalty, as a table up to the highest such row."""

    def __init__(self, vocab_size: int, device: torch.device):
        self._seen = torch.zeros((0, vocab_size), dtype=torch.bool, device=device)

    def start(self, row: int, token_ids: npt.NDArray[np.int32]) -> None:
        while row >= len(self._seen):
            more = self._seen.new_zeros((max(8, len(self._seen)), self._seen.shape[-1]))
            self._seen = torch.cat([self._seen, more])
        self._seen[row] = False
        self._seen[row, torch.from_numpy(token_ids.astype(np.int64))] = True

    def add(self, rows: npt.NDArray[np.int64], token_ids: npt.NDArray[np.int32]) -> None:
        self._seen[torch.from_numpy(rows), torch.from_numpy(token_ids.astype(np.int64))] = True

    def select(self, rows: npt.NDArray[np.int64]) -> Tensor:
        """Return the seen tokens of the rows, bool [n, vocab_size]."""
        return self._seen[torch.from_numpy(rows)]


def read_parameter(each: Parameter, message: pb.OpenRow) -> bool | int | float:
    """Return a row's value of a parameter: the off value if the row is greedy and ignores the parameter."""
    value: bool | int | float = getattr(message.sampling, each.name)
    return each.off if each.random_only and message.sampling.greedy else value


def is_plain(message: pb.OpenRow) -> bool:
    """Return True if a row is greedy on unmodified logits: every parameter has its off value."""
    is_off = all(read_parameter(each, message) == each.off for each in PARAMETERS)
    return is_off and not message.sampling.bias_token_ids


def sample(scores: Tensor, batch: SamplingBatch, seen: SeenTokens) -> tuple[Tensor, npt.NDArray[np.bool_]]:
    """Sample tokens int64 [n] from logits float32 [n, vocab_size].

    Also return bool [n], False where the logits have no finite maximum. The scores are modified in place:
    rows with `batch.wants_details` end with the scores from which the token was chosen."""
    if not batch.is_plain:
        _add_bias(scores, batch)
        _penalise(scores, batch, seen)
    if batch.is_plain or batch.params["greedy"].all():
        return _take_highest(scores)
    if (batch.params["temperature"] != 1).any():
        scores.div_(_column(batch.params["temperature"], scores.device))
    usable = np.isfinite(scores.amax(-1).numpy(force=True))
    return _choose(scores, batch), usable


def _take_highest(scores: Tensor) -> tuple[Tensor, npt.NDArray[np.bool_]]:
    """Return the id of each row's highest score, the lowest id among equal scores, and whether it is
    finite."""
    if not scores.is_cpu:
        highest, chosen = scores.max(-1)
        return chosen, np.isfinite(highest.numpy(force=True))
    values = scores.numpy()
    ids = values.argmax(-1)  # numpy's argmax is several times as fast as torch's
    return torch.from_numpy(ids), np.isfinite(values[np.arange(len(ids)), ids])


def _add_bias(scores: Tensor, batch: SamplingBatch) -> None:
    """Add the logit bias, then the watermark."""
    if (bias := batch.bias) is not None:
        scores[bias.rows, bias.token_ids] += bias.biases
    if not batch.modifiers.watermark:
        return
    marked = (batch.params["watermark_gamma"] > 0).nonzero()[0]
    if len(marked):
        previous = batch.token_ids[batch.rows[marked], batch.positions[marked] - 1]
        gammas = batch.params["watermark_gamma"][marked]
        deltas = batch.params["watermark_delta"][marked]
        is_green = torch.from_numpy(green_tokens(previous, gammas, scores.shape[-1])).to(scores.device)
        part = _take(scores, marked)
        _put(scores, marked, torch.where(is_green, part + _column(deltas, scores.device), part))


def _penalise(scores: Tensor, batch: SamplingBatch, seen: SeenTokens) -> None:
    params, modifiers = batch.params, batch.modifiers
    early = (batch.num_generated < params["min_new_tokens"]) & ~batch.must_end
    if early.any():
        _ban_eos(scores, batch, early)
    if modifiers.length_penalty:
        overdue = batch.num_generated - params["length_penalty_start"]
        overdue[early | (overdue < 0) | (params["length_penalty_factor"] == 1)] = 0
        if overdue.any():
            _boost_eos(scores, batch, overdue)
    if modifiers.repetition_penalty:
        repeating = (params["repetition_penalty"] != 1).nonzero()[0]
        if len(repeating):
            _penalise_repetition(scores, batch, repeating, seen)
    if modifiers.counted_penalties:
        counting = ((params["presence_penalty"] != 0) | (params["frequency_penalty"] != 0)).nonzero()[0]
        if len(counting):
            _penalise_generated(scores, batch, counting)


def _ban_eos(scores: Tensor, batch: SamplingBatch, early: npt.NDArray[np.bool_]) -> None:
    rows, token_ids = _find_eos(batch, early, scores.shape[-1])
    if scores.is_cpu:  # torch's indexing takes several times as long for few values
        scores.numpy()[rows, token_ids] = -np.inf
    else:
        scores[torch.from_numpy(rows), torch.from_numpy(token_ids).long()] = -torch.inf


def _find_eos(
    batch: SamplingBatch, selected: npt.NDArray[np.bool_], vocab_size: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
    """Return the indices [n] of the scores of the selected rows' end-of-sequence tokens."""
    ids = batch.eos_token_ids
    rows, columns = (selected[:, None] & (ids >= 0) & (ids < vocab_size)).nonzero()
    return rows, ids[rows, columns]


def _boost_eos(scores: Tensor, batch: SamplingBatch, overdue: npt.NDArray[np.int64]) -> None:
    rows, token_ids = _find_eos(batch, overdue > 0, scores.shape[-1])
    index = torch.from_numpy(rows), torch.from_numpy(token_ids).long()
    with np.errstate(over="ignore"):
        factor = batch.params["length_penalty_factor"].astype(np.float64) ** overdue
    growth = torch.from_numpy((np.minimum(factor, MAX_FACTOR) - 1).astype(np.float32))[index[0]]
    eos = scores[index]
    scores[index] = torch.where(eos.isinf(), eos, eos + eos.abs() * growth.to(scores.device))


def _penalise_repetition(
    scores: Tensor, batch: SamplingBatch, index: npt.NDArray[np.int64], seen: SeenTokens
) -> None:
    penalty = batch.params["repetition_penalty"][index].clip(1 / MAX_FACTOR, MAX_FACTOR)
    factor = torch.where(seen.select(batch.rows[index]), _column(penalty, scores.device), 1.0)
    part = _take(scores, index)
    _put(scores, index, torch.where(part < 0, part * factor, part / factor))


def _penalise_generated(scores: Tensor, batch: SamplingBatch, index: npt.NDArray[np.int64]) -> None:
    """Apply the presence and frequency penalties as OpenAI defines them: only generated tokens count.

    The counts are computed in every step, so that a resumed row has no state to rebuild."""
    ends = batch.positions[index]
    spans = zip(batch.rows[index], ends - batch.num_generated[index], ends, strict=True)
    counted = [np.unique(batch.token_ids[row, start:end], return_counts=True) for row, start, end in spans]
    rows = index.repeat([len(ids) for ids, _ in counted])  # [num_penalties]
    ids, counts = (np.concatenate(each) for each in zip(*counted, strict=True))
    presence = batch.params["presence_penalty"][rows]
    frequency = batch.params["frequency_penalty"][rows]
    penalties = torch.from_numpy(presence + frequency * counts.astype(np.float32))
    scores[torch.from_numpy(rows), torch.from_numpy(ids).long()] -= penalties.to(scores.device)


def _choose(scores: Tensor, batch: SamplingBatch) -> Tensor:
    params = batch.params
    limited = (params["top_k"] > 0) | (params["top_p"] < 1)
    filter_rest(scores, params, ~limited)
    chosen = torch.empty(len(scores), dtype=torch.int64, device=scores.device)
    greedy = params["greedy"].nonzero()[0]
    if len(greedy):
        _put(chosen, greedy, _take(scores, greedy).argmax(-1))
    keys = draw_keys(params["seed"], batch.positions).to(scores.device)
    free = (~params["greedy"] & ~limited).nonzero()[0]
    if len(free):
        vocabulary = torch.arange(scores.shape[-1], dtype=torch.int32, device=scores.device)
        _put(chosen, free, draw_columns(_take(scores, free), _take(keys, free), vocabulary))
    if limited.any():
        _choose_limited(scores, batch, limited.nonzero()[0], keys, chosen)
    return chosen


def _choose_limited(
    scores: Tensor, batch: SamplingBatch, index: npt.NDArray[np.int64], keys: Tensor, chosen: Tensor
) -> None:
    params = batch.params[index]
    params["top_k"][params["top_k"] >= scores.shape[-1]] = 0
    for group in filter_candidates(_take(scores, index), params):
        rows = index[group.rows]
        column = draw_columns(group.scores, keys[torch.from_numpy(rows)], group.token_ids.int())
        _put(chosen, rows, group.token_ids.gather(-1, column.unsqueeze(-1)).squeeze(-1))
        if batch.wants_details[rows].any():
            remaining = scores.new_full((len(rows), scores.shape[-1]), -torch.inf)
            _put(scores, rows, remaining.scatter_(-1, group.token_ids, group.scores))


def _column(values: npt.NDArray[np.float32], device: torch.device) -> Tensor:
    return torch.from_numpy(values.copy()).to(device).unsqueeze(-1)  # [n, 1]


def _take(x: Tensor, index: npt.NDArray[np.int64]) -> Tensor:
    """Return the rows of x at a sorted index, without a copy if the index covers all rows."""
    return x if len(index) == len(x) else x[torch.from_numpy(index)]


def _put(x: Tensor, index: npt.NDArray[np.int64], rows: Tensor) -> None:
    x[torch.from_numpy(index)] = rows
