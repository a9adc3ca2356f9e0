"""Validates requests and turns them into sequences: defaults, ranges and the exact text of every rejection,
in TGIS's order."""

import secrets
import time
from collections.abc import Hashable
from dataclasses import dataclass, replace

from tgis.pb import generation_pb2 as pb
from tgis.router.adapters.registry import AdapterLease
from tgis.router.errors import RequestError
from tgis.router.grammar.compiler import Constraint, GrammarCompiler, read_constraint
from tgis.router.metrics.metrics import Metrics
from tgis.router.sequence import CallAdapters, Details, Grammar, Sequence, Stopping
from tgis.router.text.tokenization import TokenIds
from tgis.router.text.tokenizer import Tokenizer
from tgis.sampling_parameters import RANGES, Sampling

DEFAULT_MAX_NEW_TOKENS = 20
MAX_STOP_SEQUENCES = 6
MAX_STOP_SEQUENCE_BYTES = 240
STOP_SEQUENCES_TEXT = (
    f"can specify at most {MAX_STOP_SEQUENCES} non-empty stop sequences, "
    f"each not more than {MAX_STOP_SEQUENCE_BYTES} UTF8 bytes"
)


@dataclass(frozen=True)
class RequestLimits:
    """Limits and defaults of the server."""

    max_sequence_length: int
    max_new_tokens: int
    max_top_n_tokens: int
    max_guided_bytes: int
    eos_token_ids: frozenset[int]
    include_stop_sequence: bool
    decoder_start_token_id: int | None
    """Token that the decoder of an encoder-decoder model starts from; None for decoder-only models."""
    pad_token_id: int
    """Token that stands for virtual tokens."""
    vocab_size: int
    """Size of the model's vocabulary. Its tokenizer may have token ids beyond it."""


@dataclass(frozen=True)
class CallParameters:
    """Checked parameters of one call. They apply to all its inputs."""

    sampling: Sampling
    stopping: Stopping
    details: Details
    constraint: Constraint | None
    has_seed: bool
    truncate_input_tokens: int
    input_text: bool


def check_parameters(params: pb.Parameters, limits: RequestLimits) -> CallParameters:
    """Check everything that needs neither a compiled grammar nor tokenized inputs. The time limit's clock
    starts here. Raises RequestError for the first rule that is broken."""
    stopping_time = time.monotonic() + params.stopping.time_limit_millis / 1000
    sampling = _check_sampling(params)
    stopping = params.stopping
    max_new_tokens = stopping.max_new_tokens or DEFAULT_MAX_NEW_TOKENS
    _require(max_new_tokens <= limits.max_new_tokens, f"max_new_tokens must be <= {limits.max_new_tokens}")
    _require(stopping.min_new_tokens <= max_new_tokens, "min_new_tokens must be <= max_new_tokens")
    _check_penalties(sampling)
    constraint = read_constraint(params.decoding, limits.max_guided_bytes)
    details = _check_details(params, limits.max_top_n_tokens)
    for stop in stopping.stop_sequences:
        _require(0 < len(stop.encode()) <= MAX_STOP_SEQUENCE_BYTES, STOP_SEQUENCES_TEXT)
    include = stopping.include_stop_sequence
    return CallParameters(
        sampling=sampling,
        stopping=Stopping(
            max_new_tokens=max_new_tokens,
            min_new_tokens=stopping.min_new_tokens,
            stop_sequences=tuple(stopping.stop_sequences),
            include_stop_sequence=(
                include if stopping.HasField("include_stop_sequence") else limits.include_stop_sequence
            ),
            eos_token_ids=limits.eos_token_ids,
            deadline=stopping_time if stopping.time_limit_millis else None,
        ),
        details=details,
        constraint=constraint,
        has_seed=not sampling.greedy and params.sampling.HasField("seed"),
        truncate_input_tokens=params.truncate_input_tokens,
        input_text=params.response.input_text,
    )


class Validator:
    def __init__(
        self,
        tokenizer: Tokenizer,
        limits: RequestLimits,
        grammar_compiler: GrammarCompiler,
        metrics: Metrics,
    ) -> None:
        self.limits = limits
        self._tokenizer, self._grammar_compiler, self._metrics = tokenizer, grammar_compiler, metrics

    async def sequences(
        self, texts: list[str], params: CallParameters, lease: AdapterLease, connection: Hashable
    ) -> list[Sequence]:
        """Return one sequence per text of a call, in order. Each is valid while `lease` is open.

        Texts are tokenized up to the first whose bytes alone prove that it is too long. Raises RequestError
        for the first text that cannot be served, and everything that `AdapterLease.take` raises."""
        constraint = params.constraint
        grammar = None if constraint is None else await self._grammar_compiler.compile(constraint)
        adapters = await lease.take()
        num_served, least = self._find_too_long(texts, params, adapters)
        # A text with more tokens is refused, so no more of them are needed.
        max_ids = self.limits.max_sequence_length
        inputs = await self._tokenizer.encode_ids(texts[:num_served], max_ids, connection)
        for ids in inputs:
            self._metrics.request_raw_input_length.observe(ids.num_tokens)
        sequences = [self._sequence(ids, params, grammar, adapters) for ids in inputs]
        if num_served < len(texts):  # the texts before it can be served, and this refuses it
            self._check_length(least, f"at least {least}", params.stopping, adapters)
        return sequences

    def _find_too_long(
        self, texts: list[str], params: CallParameters, adapters: CallAdapters
    ) -> tuple[int, int]:
        """Return the index of the first text whose bytes alone prove that it is too long, and the least
        number of tokens that truncation leaves of it. Return the number of texts and 0 if there is none."""
        bound = self._tokenizer.max_bytes_per_token
        if bound is None:
            return len(texts), 0
        limit, minimum = self.limits.max_sequence_length, params.stopping.min_new_tokens
        room = limit - self._prefix_length(adapters) - max(minimum, 1)
        for i, text in enumerate(texts):
            least = -(-len(text.encode()) // bound)  # rounded up
            least = min(least, params.truncate_input_tokens or least)
            # an empty text is tokenized, because it may be refused for having no tokens
            if least > max(room, 0):
                return i, least
        return len(texts), 0

    def _sequence(
        self, ids: TokenIds, params: CallParameters, grammar: Grammar | None, adapters: CallAdapters
    ) -> Sequence:
        start, pad = self.limits.decoder_start_token_id, self.limits.pad_token_id
        num_before = adapters.num_decoder_tokens if start is None else adapters.num_encoder_tokens
        _require(ids.num_tokens + num_before > 0, "tokenizer error the input has no tokens")
        num_inputs, token_ids = self._tokenizer.truncate(ids, params.truncate_input_tokens)
        num_left = self._check_length(num_inputs, str(num_inputs), params.stopping, adapters)
        vocab_size, largest = self.limits.vocab_size, max(token_ids, default=-1)
        _require(
            largest < vocab_size,
            f"input token id {largest} is beyond the model's vocabulary of {vocab_size} tokens",
        )
        seeded = params.sampling.greedy or params.has_seed
        before = [pad] * adapters.num_decoder_tokens
        encoder_before = [pad] * adapters.num_encoder_tokens
        return Sequence(
            before + (token_ids if start is None else [start]),
            _reduce(params.stopping, num_left),
            params.sampling if seeded else replace(params.sampling, seed=secrets.randbits(32)),
            params.details,
            grammar,
            adapters=adapters,
            encoder_token_ids=() if start is None else tuple(encoder_before + token_ids),
        )

    def _check_length(self, num_inputs: int, shown: str, stopping: Stopping, adapters: CallAdapters) -> int:
        """Return how many tokens can follow the input. Raises RequestError, with `shown`, if too few can."""
        limit, num_virtual = self.limits.max_sequence_length, self._prefix_length(adapters)
        sums = f"input tokens ({shown}) plus prefix length ({num_virtual})"
        num_left, minimum = limit - num_inputs - num_virtual, stopping.min_new_tokens
        _require(num_left > 0, f"{sums} must be < {limit}")
        _require(minimum <= num_left, f"{sums} plus min_new_tokens ({minimum}) must be <= {limit}")
        return num_left

    def _prefix_length(self, adapters: CallAdapters) -> int:
        """Return the prefix length as TGIS counts it. In an encoder-decoder model, the decoder's virtual
        tokens count together with the start token."""
        num_tokens = adapters.num_encoder_tokens + adapters.num_decoder_tokens
        has_start = self.limits.decoder_start_token_id is not None and adapters.num_decoder_tokens > 0
        return num_tokens + has_start


def _require(condition: bool, text: str) -> None:
    if not condition:
        raise RequestError(text)


def _require_in_range(name: str, value: float) -> None:
    allowed = RANGES[name]
    _require(allowed.allows(value), allowed.refusal)


def _check_sampling(params: pb.Parameters) -> Sampling:
    """Return the parameters. The penalties of decoding are checked later, as in TGIS."""
    sampling, decoding = params.sampling, params.decoding
    length = decoding.length_penalty
    greedy = Sampling(
        repetition_penalty=decoding.repetition_penalty or 1.0,
        length_penalty_start=length.start_index,
        length_penalty_factor=length.decay_factor if decoding.HasField("length_penalty") else 1.0,
    )
    is_zero = sampling.HasField("temperature") and sampling.temperature == 0
    if params.method != pb.SAMPLE or is_zero:
        return greedy
    sampled = replace(
        greedy,
        greedy=False,
        seed=sampling.seed,
        temperature=sampling.temperature if sampling.HasField("temperature") else 1.0,
        top_k=sampling.top_k,
        top_p=sampling.top_p or 1.0,
        typical_p=sampling.typical_p,
    )
    for name in ("temperature", "top_p", "typical_p", "top_k"):
        _require_in_range(name, getattr(sampled, name))
    return sampled if 0 < sampled.typical_p < 1 else replace(sampled, typical_p=1.0)


def _check_penalties(sampling: Sampling) -> None:
    for name in ("repetition_penalty", "length_penalty_factor"):
        _require_in_range(name, getattr(sampling, name))


def _check_details(params: pb.Parameters, max_top_n: int) -> Details:
    response = params.response
    _require(len(params.stopping.stop_sequences) <= MAX_STOP_SEQUENCES, STOP_SEQUENCES_TEXT)
    wants_more = response.token_logprobs or response.token_ranks or response.top_n_tokens > 0
    _require(
        response.input_tokens or response.generated_tokens or not wants_more,
        "must request input and/or generated tokens to request extra token detail",
    )
    num_top = response.top_n_tokens
    _require(num_top <= max_top_n, f"top_n_tokens ({num_top}) must be <= {max_top_n}")
    return Details(
        generated_tokens=response.generated_tokens,
        input_tokens=response.input_tokens,
        logprobs=response.token_logprobs,
        ranks=response.token_ranks,
        top_n=num_top,
    )


def _reduce(stopping: Stopping, room: int) -> Stopping:
    """Return `stopping` with max_new_tokens reduced to the room that the model's length leaves."""
    if stopping.max_new_tokens <= room:
        return stopping
    return replace(stopping, max_new_tokens=room, reduced=True)
