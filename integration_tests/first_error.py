"""The rules of validation once more, as plain Python: which error a generation request meets first, and which
texts a client may be shown at all."""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tgis.pb import generation_pb2 as pb

STOPS = "can specify at most 6 non-empty stop sequences, each not more than 240 UTF8 bytes"
DETAIL = "must request input and/or generated tokens to request extra token detail"
OVERLOADED = "Model is overloaded"
UNREADABLE = "the request could not be decoded"

# What INVALID_ARGUMENT may say. `.` is any character: ids are quoted as they came.
INVALID = [
    r"temperature must be >= 0\.05",
    r"top_p must be > 0\.0 and <= 1\.0",
    r"top_k must be strictly positive",
    r"typical_p must be <= 1\.0",
    r"repetition_penalty must be > 0\.0",
    r"length_penalty must be >= 1\.0 and <= 10\.0",
    r"max_new_tokens must be <= \d+",
    r"min_new_tokens must be <= max_new_tokens",
    r"input tokens \(\d+\) plus prefix length \(\d+\) plus min_new_tokens \(\d+\) must be <= \d+",
    r"input tokens \(\d+\) plus prefix length \(\d+\) must be < \d+",
    r"tokenizer error .+",
    re.escape(STOPS),
    re.escape(DETAIL),
    r"top_n_tokens \(\d+\) must be <= 10",
    r"can't retrieve prompt prefix with id '.*': .+",
    r"can't retrieve adapter with id '.*': .+",
    r"adapter_id supplied but no adapter store was configured",
    r"adapter type .* is not currently supported",
    r"Invalid adapter id '.*', must contain only alphanumeric, _ and - and /",
    r"missing request",
    re.escape(UNREADABLE),
]
# Of a guided request: what is wrong with its constraint, on one line.
GUIDED = re.compile(
    r"Must provide at least two choices"
    r"|(format|json_schema|regex|choice|grammar) "
    r"(is not valid: [^\n]+|is too complex|must not [^\n]+|cannot be followed: [^\n]+)"
)


def is_documented(text: str, guided: bool) -> bool:
    """Whether INVALID_ARGUMENT may come with this text."""
    if guided and GUIDED.fullmatch(text):
        return True
    return any(re.fullmatch(pattern, text, re.DOTALL) for pattern in INVALID)


@dataclass(frozen=True)
class Server:
    """What the rules depend on."""

    max_sequence_length: int
    max_new_tokens: int
    max_concurrent_requests: int = 512


def is_greedy(params: pb.Parameters) -> bool:
    """Anything that is not SAMPLE is greedy, and so is a temperature that says zero."""
    sampling = params.sampling
    return params.method != 1 or (sampling.HasField("temperature") and sampling.temperature == 0)


def first_error(
    params: pb.Parameters,
    server: Server,
    lengths: Sequence[int],
    prefix_id: str | None,
    adapter_id: str | None,
) -> str | None:
    """The text a request is refused with, but for what its grammar adds; `lengths` are the inputs' tokens
    after truncation, in order."""
    return next(errors(params, server, lengths, prefix_id, adapter_id), None)


def errors(
    params: pb.Parameters,
    server: Server,
    lengths: Sequence[int],
    prefix_id: str | None,
    adapter_id: str | None,
) -> Iterator[str]:
    """All that is wrong, in the order in which it is told."""
    if not is_greedy(params):
        yield from sampling_errors(params.sampling)
    yield from stopping_errors(params.stopping, server)
    yield from decoding_errors(params.decoding)
    stops, response = params.stopping.stop_sequences, params.response
    if len(stops) > 6:
        yield STOPS
    asks_more = response.token_logprobs or response.token_ranks or response.top_n_tokens
    if asks_more and not (response.input_tokens or response.generated_tokens):
        yield DETAIL
    if response.top_n_tokens > 10:
        yield f"top_n_tokens ({response.top_n_tokens}) must be <= 10"
    if any(len(stop.encode()) not in range(1, 241) for stop in stops):
        yield STOPS
    if adapter_id is not None:
        yield "adapter_id supplied but no adapter store was configured"
    if prefix_id is not None:
        yield f"can't retrieve prompt prefix with id '{prefix_id}': prefix id \"{prefix_id}\" not found"
    for length in lengths:
        yield from length_errors(length, params.stopping.min_new_tokens, server.max_sequence_length)


def sampling_errors(sampling: pb.SamplingParameters) -> Iterator[str]:
    t, p, typical = sampling.temperature, sampling.top_p, sampling.typical_p
    if sampling.HasField("temperature") and (not math.isfinite(t) or t < 0.05):
        yield "temperature must be >= 0.05"
    if not math.isfinite(p) or p < 0 or p > 1:
        yield "top_p must be > 0.0 and <= 1.0"
    if not math.isfinite(typical) or typical > 1:
        yield "typical_p must be <= 1.0"
    if sampling.top_k > 2**31 - 1:
        yield "top_k must be strictly positive"


def stopping_errors(stopping: pb.StoppingCriteria, server: Server) -> Iterator[str]:
    max_new_tokens = stopping.max_new_tokens if stopping.max_new_tokens else 20
    if max_new_tokens > server.max_new_tokens:
        yield f"max_new_tokens must be <= {server.max_new_tokens}"
    if stopping.min_new_tokens > max_new_tokens:
        yield "min_new_tokens must be <= max_new_tokens"


def decoding_errors(decoding: pb.DecodingParameters) -> Iterator[str]:
    penalty = decoding.repetition_penalty
    if not math.isfinite(penalty) or penalty < 0:
        yield "repetition_penalty must be > 0.0"
    factor = decoding.length_penalty.decay_factor
    if decoding.HasField("length_penalty") and (math.isnan(factor) or factor < 1 or factor > 10):
        yield "length_penalty must be >= 1.0 and <= 10.0"


def length_errors(length: int, min_new_tokens: int, limit: int) -> Iterator[str]:
    sums = f"input tokens ({length}) plus prefix length (0)"
    if length >= limit:
        yield f"{sums} must be < {limit}"
    if length + min_new_tokens > limit:
        yield f"{sums} plus min_new_tokens ({min_new_tokens}) must be <= {limit}"
