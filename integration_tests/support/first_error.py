"""Implements the rules of validation again, in plain Python: the first error of a generation request, and the
texts that clients may receive."""

import json
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tokenizers import Tokenizer

from tgis.pb import generation_pb2 as pb

STOPS = "can specify at most 6 non-empty stop sequences, each not more than 240 UTF8 bytes"
DETAIL = "must request input and/or generated tokens to request extra token detail"
OVERLOADED = "Model is overloaded"
MAX_ID_BYTES = 256
UNREADABLE = "the request could not be decoded"

# Allowed texts of INVALID_ARGUMENT. `.` is any character: ids are quoted unchanged.
INVALID = [
    r"temperature must be >= 0\.05",
    r"top_p must be > 0\.0 and <= 1\.0",
    r"top_k must be strictly positive",
    r"typical_p must be <= 1\.0",
    r"repetition_penalty must be > 0\.0",
    r"length_penalty must be >= 1\.0 and <= 10\.0",
    r"max_new_tokens must be <= \d+",
    r"min_new_tokens must be <= max_new_tokens",
    r"input tokens \((at least )?\d+\) plus prefix length \(\d+\) plus min_new_tokens \(\d+\) must be <= \d+",
    r"input tokens \((at least )?\d+\) plus prefix length \(\d+\) must be < \d+",
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
# Errors of a constraint, on one line.
GUIDED = re.compile(
    r"Must provide at least two choices"
    r"|(format|json_schema|regex|choice|grammar) "
    r"(is not valid: [^\n]+|is too complex|must have at most [^\n]+|cannot be followed: [^\n]+)"
)


def is_documented(text: str, guided: bool) -> bool:
    """Return whether INVALID_ARGUMENT may have this text."""
    if guided and GUIDED.fullmatch(text):
        return True
    return any(re.fullmatch(pattern, text, re.DOTALL) for pattern in INVALID)


@dataclass(frozen=True)
class Names:
    """Existing soft prompts and adapters, by id."""

    lengths: Mapping[str, int] = field(default_factory=dict)
    """Numbers of the soft prompts' virtual tokens."""
    adapters: Collection[str] | None = None
    """Adapters; None: there is no store of them."""
    adapters_as_prompts: Collection[str] = ()
    """Adapters that a prefix_id may name if there is no adapter_id."""
    causes: Mapping[str, str] = field(default_factory=dict)
    """Reasons why other existing soft prompts cannot be used."""
    adapter_errors: Mapping[str, str] = field(default_factory=dict)
    """Complete error texts of adapters that cannot be used."""
    is_real: bool = True
    """True if the store checks the characters of ids."""

    def prefix_length(self, prefix_id: str | None) -> int:
        return 0 if prefix_id is None else self.lengths.get(prefix_id, 0)

    def prompt_error(self, prefix_id: str, has_adapter: bool) -> str | None:
        if prefix_id in self.lengths:
            return None
        shown = self._show(prefix_id)
        cause = self.causes.get(prefix_id, f'prefix id "{shown}" not found')
        if prefix_id in self.adapters_as_prompts:
            if not has_adapter:
                return None
            cause = "it is an adapter, but adapter_id names one too"
        return f"can't retrieve prompt prefix with id '{shown}': {cause}"

    def adapter_error(self, adapter_id: str) -> str | None:
        shown = self._show(adapter_id)
        missing = f"can't retrieve adapter with id '{shown}': directory does not exist"
        if not adapter_id or (self.adapters and adapter_id in self.adapters):
            return None
        if len(adapter_id.encode()) > MAX_ID_BYTES:
            return missing
        if self.adapters is None:
            return "adapter_id supplied but no adapter store was configured"
        if self.is_real and not re.fullmatch(r"[A-Za-z0-9_./-]+", adapter_id):
            return f"Invalid adapter id '{shown}', must contain only alphanumeric, _ and - and /"
        return self.adapter_errors.get(adapter_id, missing)

    def _show(self, content_id: str) -> str:
        """Return the id as quoted in errors."""
        if len(content_id.encode()) > MAX_ID_BYTES:
            return content_id.encode()[:MAX_ID_BYTES].decode(errors="ignore")
        harmless = (c if c.isprintable() or not self.is_real else repr(c)[1:-1] for c in content_id)
        return "".join(harmless)


@dataclass(frozen=True)
class Length:
    """Return an input's number of tokens after truncation, and the minimum number by its bytes alone, 0 if
    its tokenizer allows no such bound."""

    num_tokens: int
    num_least: int


def length_of(tokenizer: Tokenizer, text: str, truncate: int) -> Length:
    """Return the bound for the tests' tokenizers: byte-level, with byte fallback, or not BPE."""
    model, num_least = json.loads(tokenizer.to_str())["model"], 0
    if model["type"] == "BPE":
        entries = [entry.encode() if model["byte_fallback"] else entry for entry in tokenizer.get_vocab()]
        num_least = math.ceil(len(text.encode()) / max(map(len, entries)))
    numbers = (len(tokenizer.encode(text).ids), num_least)
    return Length(*(min(number, truncate or number) for number in numbers))


@dataclass(frozen=True)
class Server:
    """Parameters of the rules."""

    max_sequence_length: int
    max_new_tokens: int
    max_concurrent_requests: int = 512
    names: Names = field(default_factory=Names)


def is_greedy(params: pb.Parameters) -> bool:
    """Any method except SAMPLE is greedy, and so is an explicit temperature of zero."""
    sampling = params.sampling
    return params.method != 1 or (sampling.HasField("temperature") and sampling.temperature == 0)


def first_error(
    params: pb.Parameters,
    server: Server,
    lengths: Sequence[Length],
    prefix_id: str | None,
    adapter_id: str | None,
) -> str | None:
    """Return the error text of a request, except for errors of its grammar. `lengths` are in order."""
    return next(errors(params, server, lengths, prefix_id, adapter_id), None)


def errors(
    params: pb.Parameters,
    server: Server,
    lengths: Sequence[Length],
    prefix_id: str | None,
    adapter_id: str | None,
) -> Iterator[str]:
    """Yield all errors, in the order in which they are reported."""
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
    if adapter_id is not None and (error := server.names.adapter_error(adapter_id)):
        yield error
    if prefix_id is not None and (error := server.names.prompt_error(prefix_id, bool(adapter_id))):
        yield error
    prefix_length = server.names.prefix_length(prefix_id)
    for length in lengths:
        yield from length_errors(length, prefix_length, params.stopping.min_new_tokens, server)


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


def length_errors(length: Length, prefix_length: int, min_new_tokens: int, server: Server) -> Iterator[str]:
    limit = server.max_sequence_length
    is_least = length.num_least > max(0, limit - prefix_length - max(min_new_tokens, 1))
    number = length.num_least if is_least else length.num_tokens
    shown = f"at least {number}" if is_least else f"{number}"
    sums, whole = f"input tokens ({shown}) plus prefix length ({prefix_length})", number + prefix_length
    if whole >= limit:
        yield f"{sums} must be < {limit}"
    if whole + min_new_tokens > limit:
        yield f"{sums} plus min_new_tokens ({min_new_tokens}) must be <= {limit}"
