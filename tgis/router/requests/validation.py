"""Validates calls and makes sequence specs of them: applies defaults, and checks ranges in TGIS's order and
with TGIS's exact rejection texts."""

import hashlib
import secrets
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from tgis.router.engine.handle import EngineInfo, SequenceSpec
from tgis.router.errors import InputTooLongError, RequestError
from tgis.router.grammar.compiler import REASONING, Constraint, GrammarCompiler, read_constraint
from tgis.router.metrics.metrics import Metrics
from tgis.router.requests.api_rules import ALMOST_GREEDY, MAX_INPUTS, MAX_N, ApiRules
from tgis.router.requests.call import GenerationCall
from tgis.router.requests.parameters import RULES, Parameters
from tgis.router.sequence import CacheSalt, CallAdapters, Details, Grammar, Stopping
from tgis.router.text.stop_sequences import StopSequences
from tgis.router.text.tokenization import TokenIds
from tgis.router.text.tokenizer import Tokenizer
from tgis.sampling_parameters import PARAMETERS as SAMPLING_PARAMETERS
from tgis.sampling_parameters import RANGES, Sampling

MAX_STOP_SEQUENCE_BYTES = 240
STOP_SEQUENCES_TEXT = (
    "can specify at most {} non-empty stop sequences, "
    f"each not more than {MAX_STOP_SEQUENCE_BYTES} UTF8 bytes"
)
_SAME_NAMED = tuple(
    each for each in SAMPLING_PARAMETERS if hasattr(Parameters, each.name) and hasattr(Sampling, each.name)
)
"""Sampling parameters that have the same name in Parameters."""


@dataclass(frozen=True)
class RequestLimits:
    """Limits and defaults of the server."""

    max_sequence_length: int
    max_new_tokens: int | None
    """None if the operator sets no limit. Then each API's own limit applies."""
    max_top_n_tokens: int
    max_guided_bytes: int
    include_stop_sequence: bool
    watermark_gamma: float
    watermark_delta: float
    max_input_tokens: int | None = None
    """None if only the sequence length limits an input."""
    max_best_of: int | None = None
    """None: no operator limit."""
    max_stop_sequences: int | None = None
    max_client_batch_size: int | None = None
    allows_guided: bool = True

    def max_new_tokens_for(self, api: ApiRules) -> int:
        """Return the limit of `max_new_tokens` for one API."""
        limit = api.max_new_tokens if self.max_new_tokens is None else self.max_new_tokens
        room = self.max_sequence_length - 1
        return room if limit is None else min(limit, room)

    def max_stop_sequences_for(self, api: ApiRules) -> int:
        limit = self.max_stop_sequences
        if limit is None:
            return api.max_stop_sequences
        return max(limit, api.max_stop_sequences) if api.keeps_its_stop_bound else limit

    def max_best_of_for(self, api: ApiRules) -> int:
        return api.max_best_of if self.max_best_of is None else self.max_best_of

    @property
    def max_inputs(self) -> int:
        """Maximum number of inputs per HTTP request."""
        return MAX_INPUTS if self.max_client_batch_size is None else self.max_client_batch_size


class CheckedCall(NamedTuple):
    """Checked parameters of a call, which apply to all its inputs."""

    spec: SequenceSpec
    """Spec without input tokens, adapters and grammar. If the client set no seed, its seed is 0."""
    stops: StopSequences
    constraint: Constraint | None


def check_parameters(
    params: Parameters, api: ApiRules, limits: RequestLimits, eos_token_ids: frozenset[int], vocab_size: int
) -> CheckedCall:
    """Check all parameters, except for the checks that need a compiled grammar or tokenized inputs. The time
    limit starts here. Raises RequestError for the first broken rule. Rules that TGIS lacks come last."""
    deadline = time.monotonic() + params.time_limit_ms / 1000
    sampling = _check_sampling(params, api, limits)
    max_new_tokens = _check_num_new_tokens(params, api, limits)
    _check_penalties(sampling)
    constraint = _check_guided(params, limits)
    max_stops = limits.max_stop_sequences_for(api)
    _check_num_stop_sequences(params, max_stops)
    details = _check_details(params, api, limits)
    _check_stop_sequence_sizes(params, max_stops)
    _check_rules(params, vocab_size)
    # A grammar needs the model's EOS tokens to end its texts.
    ends = frozenset() if params.ignore_eos and constraint is None else eos_token_ids
    stopping = Stopping(
        max_new_tokens=max_new_tokens,
        min_new_tokens=params.min_new_tokens,
        eos_token_ids=ends.union(params.stop_token_ids),
        deadline=deadline if params.time_limit_ms else None,
    )
    include = params.include_stop_sequence
    stops = StopSequences(
        params.stop_sequences,
        limits.include_stop_sequence if include is None else include,
        params.min_new_tokens,
    )
    return CheckedCall(SequenceSpec((), stopping, sampling, details), stops, constraint)


class Validator:
    def __init__(
        self,
        tokenizer: Tokenizer,
        limits: RequestLimits,
        grammar_compiler: GrammarCompiler,
        metrics: Metrics,
        info: Callable[[], EngineInfo],
    ) -> None:
        """`info` returns the facts about the model, which are read again for each call."""
        self.limits = limits
        self._tokenizer = tokenizer
        self._grammar_compiler = grammar_compiler
        self._metrics = metrics
        self._info = info

    def count_outputs(self, call: GenerationCall) -> int:
        """Return the number of texts that a call requests. Raises RequestError."""
        n = call.parameters.n
        _require(1 <= n <= MAX_N, f"n must be >= 1 and <= {MAX_N}", parameter="n")
        return len(call.texts) * n

    def check(self, call: GenerationCall) -> CheckedCall:
        """Check a call's parameters, as `check_parameters` does."""
        info = self._info()
        eos = info.eos_token_ids | self._tokenizer.eos_token_ids
        checked = check_parameters(call.parameters, call.api, self.limits, eos, info.vocab_size)
        salt = CacheSalt(call.tenant, call.parameters.cache_salt)
        return checked._replace(spec=checked.spec._replace(cache_salt=salt))

    async def compile(self, call: GenerationCall, constraint: Constraint | None) -> Grammar | None:
        """Return the grammar of a call's texts, if it has one. Raises RequestError, OverloadedError and
        UnavailableError."""
        owner = call.tenant or call.connection
        return None if constraint is None else await self._grammar_compiler.compile(constraint, owner)

    async def specs(self, call: GenerationCall, spec: SequenceSpec) -> list[SequenceSpec]:
        """Return `n` specs for each text of a call, in order. They are copies of `spec` with input tokens and
        seeds, and with fewer new tokens if the model's length leaves less room.

        Texts are tokenized up to the first one whose number of bytes proves that it is too long. Raises
        RequestError for the first text that cannot be served, and OverloadedError."""
        num_served, min_refused = self._find_too_long(call, spec)
        # Longer texts are refused, so their further tokens are not needed.
        max_ids = self.limits.max_sequence_length
        inputs = await self._tokenizer.encode_ids(
            call.texts[:num_served],
            max_ids,
            call.connection,
            are_ids=call.inputs_are_ids,
            adds_special_tokens=call.adds_special_tokens,
        )
        for ids in inputs:
            self._metrics.request_raw_input_length.observe(ids.num_tokens)
        specs = [self._complete(spec, ids, call) for ids in inputs]
        if num_served < len(call.texts):  # All earlier texts can be served, so this one is refused.
            self._check_length(min_refused, f"at least {min_refused}", spec)
        return [sibling for complete in specs for sibling in _siblings(complete, call.parameters.n)]

    def _find_too_long(self, call: GenerationCall, spec: SequenceSpec) -> tuple[int, int]:
        """Return the index of the first text whose number of bytes proves that it is too long, and a lower
        bound of its tokens after truncation. If there is none, return the number of texts and 0."""
        texts = call.texts
        bound = self._tokenizer.max_bytes_per_token
        if bound is None or call.inputs_are_ids:  # counting ids is as cheap as counting bytes
            return len(texts), 0
        limit = self.limits.max_sequence_length
        minimum = spec.stopping.min_new_tokens
        room = limit - self._prefix_length(spec.adapters) - max(minimum, 1)
        room = min(room, self.limits.max_input_tokens or room)
        for index, text in enumerate(texts):
            min_tokens = -(-len(text.encode()) // bound)  # rounded up
            min_tokens = min(min_tokens, call.parameters.truncate_input_tokens or min_tokens)
            # An empty text must be tokenized, because it may be refused for having no tokens.
            if min_tokens > max(room, 0):
                return index, min_tokens
        return len(texts), 0

    def _complete(self, spec: SequenceSpec, ids: TokenIds, call: GenerationCall) -> SequenceSpec:
        info = self._info()
        adapters = spec.adapters
        params = call.parameters
        num_before = adapters.num_encoder_tokens if info.is_encoder_decoder else adapters.num_decoder_tokens
        has_tokens = ids.num_tokens + num_before > 0
        _require(has_tokens, "tokenizer error the input has no tokens", parameter="text")
        num_inputs, token_ids = self._tokenizer.truncate(
            ids,
            params.truncate_input_tokens,
            begins_as_texts=call.adds_special_tokens and not call.inputs_are_ids,
        )
        num_left = self._check_length(num_inputs, str(num_inputs), spec)
        if not call.api.shortens_texts and params.max_new_tokens > num_left:
            raise InputTooLongError("max_new_tokens do not fit after the input", num_inputs, "max_new_tokens")
        vocab_size = info.vocab_size
        largest = max(token_ids, default=-1)
        _require(
            largest < vocab_size,
            f"input token id {largest} is beyond the model's vocabulary of {vocab_size} tokens",
            parameter="text",
        )
        sampling = spec.sampling
        if not sampling.greedy and params.seed is None:
            sampling = replace(sampling, seed=secrets.randbits(32))
        return spec._replace(
            input_ids=tuple(token_ids), stopping=_reduce(spec.stopping, num_left), sampling=sampling
        )

    def _check_length(self, num_inputs: int, shown: str, spec: SequenceSpec) -> int:
        """Return how many tokens fit after the input. Raises InputTooLongError if they are too few."""
        limit = self.limits.max_sequence_length
        num_virtual = self._prefix_length(spec.adapters)
        sums = f"input tokens ({shown}) plus prefix length ({num_virtual})"
        num_left = limit - num_inputs - num_virtual
        minimum = spec.stopping.min_new_tokens
        if num_left <= 0:
            raise InputTooLongError(f"{sums} must be < {limit}", num_inputs)
        if minimum > num_left:
            raise InputTooLongError(f"{sums} plus min_new_tokens ({minimum}) must be <= {limit}", num_inputs)
        max_input_tokens = self.limits.max_input_tokens
        if max_input_tokens is not None and num_inputs > max_input_tokens:
            raise InputTooLongError(f"input tokens ({shown}) must be <= {max_input_tokens}", num_inputs)
        return num_left

    def _prefix_length(self, adapters: CallAdapters) -> int:
        """Return the prefix length as TGIS counts it. In an encoder-decoder model, the decoder's virtual
        tokens count together with the start token."""
        has_start = self._info().is_encoder_decoder and adapters.num_decoder_tokens > 0
        return adapters.num_virtual_tokens + has_start


def _require(condition: bool, text: str, *, parameter: str = "") -> None:
    if not condition:
        raise RequestError(text, parameter)


def _require_in_range(name: str, value: float) -> None:
    allowed = RANGES[name]
    _require(allowed.allows(value), allowed.refusal, parameter=name)


def _check_sampling(params: Parameters, api: ApiRules, limits: RequestLimits) -> Sampling:
    """Check and return the sampling parameters. The decoding penalties are checked later, as in TGIS."""
    start_index, decay_factor = params.length_penalty or (0, 1.0)
    greedy = Sampling(
        **_same_named(params, random_only=False),
        watermark_gamma=limits.watermark_gamma if params.watermark else 0.0,
        watermark_delta=limits.watermark_delta if params.watermark else 0.0,
        logit_bias=params.logit_bias,
        length_penalty_start=start_index,
        length_penalty_factor=decay_factor,
    )
    temperature = 1.0 if params.temperature is None else params.temperature
    if not params.sample or temperature == 0:
        return greedy
    _require(api.temperature.allows(temperature), api.temperature.refusal, parameter="temperature")
    if temperature < ALMOST_GREEDY:
        return greedy
    sampled = replace(greedy, greedy=False, **_same_named(params, random_only=True))
    for name in ("top_p", "typical_p", "top_k"):
        _require_in_range(name, getattr(sampled, name))
    return sampled if 0 < sampled.typical_p < 1 else replace(sampled, typical_p=1.0)


def _same_named(params: Parameters, *, random_only: bool) -> dict[str, Any]:
    """Return the sampling parameters that Parameters has under the same name. Unset ones are off."""
    named = (each for each in _SAME_NAMED if each.random_only == random_only)
    return {each.name: getattr(params, each.name) or each.off for each in named}


def _check_num_new_tokens(params: Parameters, api: ApiRules, limits: RequestLimits) -> int:
    """Check the limits of new tokens, and return the maximum."""
    max_allowed = limits.max_new_tokens_for(api)
    max_new_tokens = params.max_new_tokens or api.default_max_new_tokens or max_allowed
    # Without a limit of the operator or the API, the room after the input shortens the answer.
    is_bounded = limits.max_new_tokens is not None or api.max_new_tokens is not None
    _require(
        max_new_tokens <= max_allowed or not is_bounded,
        f"max_new_tokens must be <= {max_allowed}",
        parameter="max_new_tokens",
    )
    _require(
        params.min_new_tokens <= max_new_tokens,
        "min_new_tokens must be <= max_new_tokens",
        parameter="min_new_tokens",
    )
    return max_new_tokens


def _check_penalties(sampling: Sampling) -> None:
    for name in ("repetition_penalty", "length_penalty_factor"):
        _require_in_range(name, getattr(sampling, name))


def _check_guided(params: Parameters, limits: RequestLimits) -> Constraint | None:
    """Return the request's constraint. A reasoning limit is allowed even if grammars are not supported."""
    if params.guided is None:
        return None
    constraint = read_constraint(params.guided, limits.max_guided_bytes)
    if constraint is not None and constraint.field != REASONING:
        _require(limits.allows_guided, "grammar is not supported", parameter=constraint.field)
    return constraint


def _check_num_stop_sequences(params: Parameters, max_stops: int) -> None:
    is_allowed = len(params.stop_sequences) <= max_stops
    _require(is_allowed, STOP_SEQUENCES_TEXT.format(max_stops), parameter="stop_sequences")


def _check_stop_sequence_sizes(params: Parameters, max_stops: int) -> None:
    refusal = STOP_SEQUENCES_TEXT.format(max_stops)
    for stop in params.stop_sequences:
        _require(0 < len(stop.encode()) <= MAX_STOP_SEQUENCE_BYTES, refusal, parameter="stop_sequences")


def _check_details(params: Parameters, api: ApiRules, limits: RequestLimits) -> Details:
    num_top = params.top_n_tokens
    max_top_n = api.max_top_n_tokens or limits.max_top_n_tokens
    wants_more = params.token_logprobs or params.token_ranks or num_top > 0
    _require(
        params.input_tokens or params.generated_tokens or not wants_more,
        "must request input and/or generated tokens to request extra token detail",
    )
    is_shown = num_top <= max_top_n
    _require(is_shown, f"top_n_tokens ({num_top}) must be <= {max_top_n}", parameter="top_n_tokens")
    return Details(
        generated_tokens=params.generated_tokens,
        input_tokens=params.input_tokens,
        logprobs=params.token_logprobs,
        ranks=params.token_ranks,
        top_n=num_top,
        raw=params.raw_details,
    )


def _siblings(spec: SequenceSpec, n: int) -> Iterator[SequenceSpec]:
    """Yield the spec, and n - 1 copies with other seeds that do not report input tokens."""
    yield spec
    details = replace(spec.details, input_tokens=False)
    for number in range(1, n):
        seed = _sibling_seed(spec.sampling.seed, number)
        yield spec._replace(sampling=replace(spec.sampling, seed=seed), details=details)


def _sibling_seed(seed: int, number: int) -> int:
    digest = hashlib.blake2b(struct.pack("<QQ", seed, number), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _check_rules(params: Parameters, vocab_size: int) -> None:
    for name, rule in RULES.items():
        value = getattr(params, name)
        _require(not value or rule.allows(value), rule.refusal, parameter=name)
    _check_token_ids("logit_bias", [token_id for token_id, _ in params.logit_bias], vocab_size)
    _check_token_ids("stop_token_ids", params.stop_token_ids, vocab_size)


def _check_token_ids(name: str, token_ids: Iterable[int], vocab_size: int) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise RequestError(
                f"{name}: token id {token_id} is beyond the model's vocabulary of {vocab_size} tokens", name
            )


def _reduce(stopping: Stopping, room: int) -> Stopping:
    """Return `stopping` with max_new_tokens reduced to the room that the model's length leaves."""
    if stopping.max_new_tokens <= room:
        return stopping
    return replace(stopping, max_new_tokens=room, reduced=True)
