"""What a step has to say, as the columns of its StepResponse."""

import zlib

import numpy as np
import numpy.typing as npt

from tgis.pb import shard_pb2 as pb
from tgis.shard.batch import Booleans, InputSpan, Integers, TokenIds, Wanted
from tgis.shard.details import TokenDetails


def digest(rows: Integers, token_ids: TokenIds) -> int:
    """Of the sampled tokens [n]: 32 bits that are equal on all ranks, or something is wrong."""
    return zlib.crc32(token_ids.astype("<i4").tobytes(), zlib.crc32(rows.astype("<i4").tobytes()))


def write_sampled(response: pb.StepResponse, rows: Integers, token_ids: TokenIds, ended: Booleans) -> None:
    response.rows = rows.astype("<i4").tobytes()
    response.token_ids = token_ids.astype("<i4").tobytes()
    response.ended = ended.astype(np.uint8).tobytes()


def write_details(response: pb.StepResponse, wanted: Wanted, at: Integers, details: TokenDetails) -> None:
    """`details` are those of the sampled tokens `at`; the others, of the rows that asked for none, get NaN
    and 0."""
    num_sampled = len(wanted.top_n)
    if wanted.logprobs.any():
        response.logprobs = _spread(details.logprobs, at, num_sampled, np.nan, "<f4")
    if wanted.ranks.any():
        response.ranks = _spread(details.ranks, at, num_sampled, 0, "<i4")
    if wanted.top_n.any():
        response.top_tokens.counts = _spread(details.top_counts, at, num_sampled, 0, "<i4")
        _write_top(response.top_tokens, details)


def write_input(response: pb.StepResponse, span: InputSpan, details: TokenDetails | None) -> None:
    """None where the row wants its input's ids reported and nothing else."""
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
