"""Writes the results of a step into the columns of its StepResponse."""

import logging
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tgis.pb import shard_pb2 as pb
from tgis.shard.runner.row_table import Booleans, Integers, TokenIds
from tgis.shard.sampling.logprobs import InputSpan, TokenDetails, concatenate

logger = logging.getLogger(__name__)

NOT_FINITE = "the maximum of the model's logits is not finite"


class Problem(NamedTuple):
    """Reason why a row cannot be served."""

    row: int
    text: str
    cause: pb.RowError.Cause = pb.RowError.CAUSE_UNSPECIFIED


@dataclass(frozen=True)
class SampledDetails:
    wanted: npt.NDArray[np.void]  # [num_detailed], as in `Traits`
    at: Integers  # [num_detailed], sorted indices in [n]
    details: TokenDetails  # [num_detailed]


@dataclass(frozen=True)
class SampledTokens:
    kept: Integers  # [n], indices of the positions with a sampled token
    rows: Integers  # [n]
    token_ids: TokenIds  # [n]
    ended: Booleans  # [n]
    details: SampledDetails | None  # None if no row requests details, and on ranks other than 0
    problems: list[Problem]  # one for each position without a sampled token


def digest(parts: Sequence[SampledTokens]) -> int:
    """Return a 32-bit checksum of the sampled tokens, which must be equal on all ranks."""
    checksum = 0
    for part in parts:
        checksum = zlib.crc32(part.rows.astype("<i4").tobytes(), checksum)
        checksum = zlib.crc32(part.token_ids.astype("<i4").tobytes(), checksum)
    return checksum


def write_sampled(
    response: pb.StepResponse, parts: Sequence[SampledTokens], num_proposed: Mapping[int, int]
) -> None:
    """Write the tokens row by row. `num_proposed` has the number of drafts that the shard proposed, by row.
    Tokens of rows that request no details get logprob NaN and rank 0."""
    first, *further = parts
    rows = first.rows
    token_ids = first.token_ids
    ended = first.ended
    details = first.details
    if further or num_proposed:
        token_rows = np.concatenate([part.rows for part in parts])
        order = token_rows.argsort(kind="stable")
        rows, counts = np.unique(token_rows, return_counts=True)
        token_ids = np.concatenate([part.token_ids for part in parts])[order]
        ended = np.concatenate([part.ended for part in parts])[order][counts.cumsum() - 1]
        details = _sort_details(parts, order)
        response.num_tokens = counts.astype("<i4").tobytes()
    if num_proposed:
        response.num_drafts = np.array([num_proposed.get(row, 0) for row in rows.tolist()], "<i4").tobytes()
    response.rows = rows.astype("<i4").tobytes()
    response.token_ids = token_ids.astype("<i4").tobytes()
    response.ended = ended.tobytes()
    if details:
        _write_details(response, details, len(token_ids))


def _sort_details(parts: Sequence[SampledTokens], order: Integers) -> SampledDetails | None:
    """Join the details of all parts, for the tokens in the given order."""
    begins = accumulate((len(part.rows) for part in parts), initial=0)
    detailed = [(part.details, begin) for part, begin in zip(parts, begins, strict=False) if part.details]
    if not detailed:
        return None
    at = order.argsort()[np.concatenate([details.at + begin for details, begin in detailed])]
    index = at.argsort()
    wanted = np.concatenate([details.wanted for details, _ in detailed])
    details = concatenate([details.details for details, _ in detailed])
    return SampledDetails(wanted[index], at[index], details.take(index))


def _write_details(response: pb.StepResponse, sampled: SampledDetails, num_sampled: int) -> None:
    wanted = sampled.wanted
    at = sampled.at
    details = sampled.details
    if wanted["logprobs"].any():
        response.logprobs = _spread(details.logprobs, at, num_sampled, np.nan, "<f4")
    if wanted["ranks"].any():
        response.ranks = _spread(details.ranks, at, num_sampled, 0, "<i4")
    if wanted["top_n"].any():
        response.top_tokens.counts = _spread(details.top_counts, at, num_sampled, 0, "<i4")
        _write_top(response.top_tokens, details)


def report_problem(response: pb.StepResponse, problem: Problem, is_answering: bool) -> None:
    """Log a problem. On the answering rank, also add it to the response."""
    logger.warning("row %d cannot be served: %s", problem.row, problem.text)
    if is_answering:
        response.errors.add(row=problem.row, message=problem.text, cause=problem.cause)


def write_input(response: pb.StepResponse, span: InputSpan, details: TokenDetails | None) -> None:
    """Write the details of a span of prompt tokens. `details` is None if the row requests only the ids."""
    message = response.input_details.add(row=span.row, start=span.start, count=len(span.token_ids))
    if details is not None:
        message.logprobs = details.logprobs.astype("<f4").tobytes()
        message.ranks = details.ranks.astype("<i4").tobytes()
        message.top_tokens.counts = details.top_counts.astype("<i4").tobytes()
        _write_top(message.top_tokens, details)


def _write_top(message: pb.TopTokens, details: TokenDetails) -> None:
    message.token_ids = details.top_ids.astype("<i4").tobytes()
    message.logprobs = details.top_logprobs.astype("<f4").tobytes()


def _spread(values: npt.NDArray[np.generic], at: Integers, size: int, other: float, dtype: str) -> bytes:
    column = np.full(size, other, dtype)
    column[at] = values
    return column.tobytes()
