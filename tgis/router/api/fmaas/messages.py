"""Converts the public messages to plain values, and results to the messages that TGIS's clients expect."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

from tgis.pb import generation_pb2 as pb
from tgis.router.api.fmaas.call_metadata import CallMetadata
from tgis.router.api.fmaas.rules import FMAAS
from tgis.router.api.grpc.described_fields import describe_fields
from tgis.router.api.service import Result
from tgis.router.engine.handle import SequenceSpec
from tgis.router.events import InputTokens, Output
from tgis.router.grammar.compiler import JSON, Guided
from tgis.router.requests.call import MISSING_REQUEST, GenerationCall
from tgis.router.requests.parameters import Parameters
from tgis.router.sequence import Details, StopReason, TokenDetail

_NOT_FINISHED = StopReason.NOT_FINISHED  # looked up once, because every token needs it

MAX_ITEMS = 65_536  # limit for reading a list: longer lists exceed every limit and take long to read
TOO_MANY_REQUESTS = f"a batch must have at most {MAX_ITEMS} requests"
ECHO_GAP = "\n\n"  # separates an input from its answer; a text that continues its input needs no gap


class CallSource(NamedTuple):
    """Facts about a call besides its message."""

    metadata: CallMetadata = CallMetadata()
    connection: str = ""
    tenant: str = ""
    time_left_s: float | None = None


NO_SOURCE = CallSource()


def read_batch(request: pb.BatchedGenerationRequest, source: CallSource = NO_SOURCE) -> GenerationCall:
    num_texts = len(request.requests)
    kind = "single" if num_texts == 1 else "batch"
    if num_texts > MAX_ITEMS:
        refused = source.metadata._replace(refusal=TOO_MANY_REQUESTS)
        source = source._replace(metadata=refused)
        return _read_call(request, "Generate", kind, [""] * num_texts, source)
    return _read_call(request, "Generate", kind, [item.text for item in request.requests], source)


def read_single(request: pb.SingleGenerationRequest, source: CallSource = NO_SOURCE) -> GenerationCall:
    return _read_call(request, "GenerateStream", "stream", [request.request.text], source)


def _read_call(
    request: pb.BatchedGenerationRequest | pb.SingleGenerationRequest,
    method: str,
    kind: str,
    texts: list[str],
    source: CallSource,
) -> GenerationCall:
    metadata = source.metadata
    return GenerationCall(
        method,
        kind,
        texts,
        _read_parameters(request.params, metadata.parameters),
        partial(describe, request.params, metadata),
        metadata.headers,
        source.connection,
        prefix_id=request.prefix_id if request.HasField("prefix_id") else None,
        adapter_id=request.adapter_id if request.HasField("adapter_id") else None,
        model_id=request.model_id,
        refusal=MISSING_REQUEST if _lacks_input(request) else metadata.refusal,
        inputs_are_ids=metadata.inputs_are_ids,
        tenant=source.tenant,
        api=FMAAS,
        time_left_s=source.time_left_s,
    )


def _lacks_input(request: pb.BatchedGenerationRequest | pb.SingleGenerationRequest) -> bool:
    return isinstance(request, pb.SingleGenerationRequest) and not request.HasField("request")


def _read_parameters(params: pb.Parameters, metadata_parameters: Mapping[str, Any]) -> Parameters:
    sampling = params.sampling
    stopping = params.stopping
    response = params.response
    decoding = params.decoding
    penalty = decoding.length_penalty
    include = stopping.include_stop_sequence
    return Parameters(
        sample=params.method == pb.SAMPLE,
        temperature=sampling.temperature if sampling.HasField("temperature") else None,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        typical_p=sampling.typical_p,
        seed=sampling.seed if sampling.HasField("seed") else None,
        repetition_penalty=decoding.repetition_penalty,
        length_penalty=(
            (penalty.start_index, penalty.decay_factor) if decoding.HasField("length_penalty") else None
        ),
        max_new_tokens=stopping.max_new_tokens,
        min_new_tokens=stopping.min_new_tokens,
        time_limit_ms=stopping.time_limit_millis,
        stop_sequences=tuple(stopping.stop_sequences[: MAX_ITEMS + 1]),
        include_stop_sequence=include if stopping.HasField("include_stop_sequence") else None,
        guided=read_guided(decoding),
        generated_tokens=response.generated_tokens,
        input_tokens=response.input_tokens,
        token_logprobs=response.token_logprobs,
        token_ranks=response.token_ranks,
        top_n_tokens=response.top_n_tokens,
        truncate_input_tokens=params.truncate_input_tokens,
        **metadata_parameters,
    )


def read_guided(decoding: pb.DecodingParameters) -> Guided | None:
    match decoding.WhichOneof("guided"):
        case None:
            return None
        case "format":
            return Guided("format", JSON if decoding.format == pb.DecodingParameters.JSON else "")
        case "choice":
            return Guided("choice", choices=tuple(decoding.choice.choices[: MAX_ITEMS + 1]))
        case field:
            return Guided(field, getattr(decoding, field))


def describe(params: pb.Parameters, metadata: CallMetadata) -> str:
    """Return the decoding method and the set parameters: numbers in full, texts by length, lists by count."""
    default = () if params.method else ("method=GREEDY",)
    return ", ".join((*default, *describe_fields(params), *metadata.describe()))


class ResponseWriter:
    """Writer of answers. `text_of` returns a token's text: its piece in the vocabulary, or its id."""

    def __init__(self, text_of: Callable[[int], str]) -> None:
        self._text_of = text_of
        # Reused, because creating a message costs more than the rest of writing it.
        self._plain = pb.GenerationResponse()
        self._serialize_plain = self._plain.SerializeToString

    def batch(
        self, request: pb.BatchedGenerationRequest, results: list[Result], is_encoder_decoder: bool
    ) -> pb.BatchedGenerationResponse:
        """Return the answer of a unary call. Each text begins with its input if the client asked for that."""
        echoes = [""] * len(results)
        if request.params.response.input_text:
            gap = ECHO_GAP if is_encoder_decoder else ""
            echoes = [item.text + gap for item in request.requests]
        return pb.BatchedGenerationResponse(responses=map(self._unary, results, echoes))

    def _unary(self, result: Result, echo: str) -> pb.GenerationResponse:
        spec, last = result.spec, result.last
        assert last is not None, "a generation ends with an output"
        is_empty = not last.num_generated  # expired before its first step: only the reason is returned
        return pb.GenerationResponse(
            input_token_count=len(spec.input_ids),
            generated_token_count=last.num_generated,
            text="" if is_empty else echo + result.text,
            stop_reason=last.reason.name,
            stop_sequence=last.stop_sequence,
            seed=0 if is_empty else spec.sampling.seed,
            tokens=self._token_infos(result.tokens, spec.details),
            input_tokens=self._token_infos(result.input_tokens, spec.details),
        )

    def header(self, request: pb.SingleGenerationRequest, spec: SequenceSpec) -> pb.GenerationResponse:
        """Return the first message of a stream. It is sent before the first step."""
        return pb.GenerationResponse(
            input_token_count=len(spec.input_ids),
            seed=spec.sampling.seed,
            text=request.request.text if request.params.response.input_text else "",
        )

    def message(
        self, event: InputTokens | Output, spec: SequenceSpec
    ) -> pb.GenerationResponse | bytes | None:
        """Return the output's message, or None if it has no text and the client did not ask for tokens. Most
        messages have only a text; these are returned serialized."""
        details = spec.details
        if isinstance(event, InputTokens):
            infos = self._token_infos(event.tokens, details)
            return pb.GenerationResponse(input_tokens=infos, input_token_count=len(infos))
        text = event.text
        is_last = event.reason is not _NOT_FINISHED
        if not is_last and not details.generated_tokens:
            if not text:
                return None
            self._plain.generated_token_count = event.num_generated
            self._plain.text = text
            return self._serialize_plain()
        return pb.GenerationResponse(
            generated_token_count=event.num_generated,
            text=text,
            stop_reason=event.reason.name,
            stop_sequence=event.stop_sequence,
            seed=spec.sampling.seed if is_last and event.num_generated else 0,
            tokens=self._token_infos(event.tokens if details.generated_tokens else (), details),
        )

    def _token_infos(self, tokens: Iterable[TokenDetail], details: Details) -> list[pb.TokenInfo]:
        return [
            pb.TokenInfo(
                text=self._text_of(token.token_id),
                logprob=token.logprob,
                rank=token.rank,
                top_tokens=self._top_tokens(token, details.logprobs),
            )
            for token in tokens
        ]

    def _top_tokens(self, token: TokenDetail, with_logprobs: bool) -> list[pb.TokenInfo.TopToken]:
        """Return the top tokens, by probability if the answer shows logprobs, otherwise by token id."""
        top = token.top_tokens if with_logprobs else sorted(token.top_tokens)
        return [
            pb.TokenInfo.TopToken(text=self._text_of(token_id), logprob=logprob if with_logprobs else 0.0)
            for token_id, logprob in top
        ]
