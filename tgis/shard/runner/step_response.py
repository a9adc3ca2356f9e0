"""Writes the results of a step into the columns of its StepResponse."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tgis.pb import shard_pb2 as pb
from tgis.shard.runner.row_table import Booleans, Integers, TokenIds
from tgis.shard.sampling.logprobs import InputSpan, TokenDetails, concatenate


class Problem(NamedTuple):
    """Reason why a row cannot be served."""

    row: int
    text: str
    cause: pb.RowError.Cause = pb.RowError.CAUSE_UNSPECIFIED


@dataclass(frozen=True)
class SampledDetails:
    wanted: npt.NDArray[np.void]  # [n], as in `Traits`
    at: Integers  # [num_detailed], indices in [n]
    details: TokenDetails  # [num_detailed]


@dataclass(frozen=True)
class SampledTokens:
    kept: Integers  # [n], indices of the positions for which a token was sampled
    rows: Integers  # [n]
    token_ids: TokenIds  # [n]
    ended: Booleans  # [n]
    details: SampledDetails | None  # None if no row asks for any, and on ranks other than 0
    problems: list[Problem]  # one for each of the other positions


def digest(parts: Sequence[SampledTokens]) -> int:
    """Return a 32-bit checksum of the sampled tokens, which must be equal on all ranks."""
    found = 0
    for part in parts:
        found = zlib.crc32(part.rows.astype("<i4").tobytes(), found)
        found = zlib.crc32(part.token_ids.astype("<i4").tobytes(), found)
    return found


def write_sampled(response: pb.StepResponse, parts: Sequence[SampledTokens]) -> None:
    """Write the parts in order. Tokens of rows that asked for no details get logprob NaN and rank 0."""
    response.rows = b"".join(part.rows.astype("<i4").tobytes() for part in parts)
    response.token_ids = b"".join(part.token_ids.astype("<i4").tobytes() for part in parts)
    response.ended = b"".join(part.ended.tobytes() for part in parts)
    if any(part.details for part in parts):
        begins = accumulate((len(part.rows) for part in parts), initial=0)
        _write_details(
            response,
            [(part.details, begin) for part, begin in zip(parts, begins, strict=False) if part.details],
        )


def _write_details(response: pb.StepResponse, parts: list[tuple[SampledDetails, int]]) -> None:
    """Write the details of parts, each with the index of its first sampled token."""
    num_sampled = len(response.ended)
    at = np.concatenate([part.at + begin for part, begin in parts])
    details = concatenate([part.details for part, _ in parts])
    if any(part.wanted["logprobs"].any() for part, _ in parts):
        response.logprobs = _spread(details.logprobs, at, num_sampled, np.nan, "<f4")
    if any(part.wanted["ranks"].any() for part, _ in parts):
        response.ranks = _spread(details.ranks, at, num_sampled, 0, "<i4")
    if any(part.wanted["top_n"].any() for part, _ in parts):
        response.top_tokens.counts = _spread(details.top_counts, at, num_sampled, 0, "<i4")
        _write_top(response.top_tokens, details)


def write_input(response: pb.StepResponse, span: InputSpan, details: TokenDetails | None) -> None:
    """Write the details of a span of prompt tokens. `details` is None if the row asks for their ids only."""
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
