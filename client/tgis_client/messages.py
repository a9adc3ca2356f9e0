"""Builds the messages of calls, and reads those of answers."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from tgis_client.arguments import CallArguments
from tgis_client.errors import SettingsError
from tgis_client.parameters import Parameters
from tgis_client.pb import generation_pb2 as pb
from tgis_client.results import (
    NO_REPORT,
    CallReport,
    Generation,
    ModelInfo,
    ModelKind,
    Offset,
    StopReason,
    Token,
    Tokenization,
    TopToken,
)

_TRAILERS = {
    "queue_ms": float,
    "first_token_ms": float,
    "total_ms": float,
    "prompt_tokens": int,
    "cached_tokens": int,
    "generated_tokens": int,
}


def batch_request(
    texts: Sequence[str], parameters: Parameters, arguments: CallArguments
) -> pb.BatchedGenerationRequest:
    return pb.BatchedGenerationRequest(
        requests=[pb.GenerationRequest(text=text) for text in texts],
        params=_parameters(parameters),
        **_ids(arguments),
    )


def single_request(text: str, parameters: Parameters, arguments: CallArguments) -> pb.SingleGenerationRequest:
    return pb.SingleGenerationRequest(
        request=pb.GenerationRequest(text=text), params=_parameters(parameters), **_ids(arguments)
    )


def tokenize_request(
    texts: Sequence[str], arguments: CallArguments, **more: Any
) -> pb.BatchedTokenizeRequest:
    return pb.BatchedTokenizeRequest(
        requests=[pb.TokenizeRequest(text=text) for text in texts], **_ids(arguments), **more
    )


def _ids(arguments: CallArguments) -> dict[str, Any]:
    names = ("model_id", "prefix_id", "adapter_id")
    return {name: arguments.get(name) for name in names}


def _parameters(given: Parameters) -> pb.Parameters:
    """Return the message of these parameters. Raises SettingsError if its fields cannot hold them."""
    try:
        return _unchecked_parameters(given)
    except (ValueError, TypeError) as error:
        raise SettingsError(f"the parameters cannot be sent: {error}") from error


def _unchecked_parameters(given: Parameters) -> pb.Parameters:
    message = pb.Parameters(
        method="SAMPLE" if given.is_sampling else "GREEDY",
        sampling=pb.SamplingParameters(
            temperature=given.temperature,
            top_k=given.top_k,
            top_p=given.top_p,
            typical_p=given.typical_p,
            seed=given.seed,
        ),
        stopping=pb.StoppingCriteria(
            max_new_tokens=given.max_new_tokens,
            min_new_tokens=given.min_new_tokens,
            time_limit_millis=given.time_limit_millis,
            stop_sequences=given.stop_sequences,
        ),
        response=pb.ResponseOptions(
            input_text=given.input_text,
            generated_tokens=given.tokens,
            input_tokens=given.input_tokens,
            token_logprobs=given.logprobs,
            token_ranks=given.ranks,
            top_n_tokens=given.top_n_tokens,
        ),
        decoding=_decoding(given),
        truncate_input_tokens=given.truncate_input_tokens,
    )
    if given.include_stop_sequence is not None:
        message.stopping.include_stop_sequence = given.include_stop_sequence
    return message


def _decoding(given: Parameters) -> pb.DecodingParameters:
    message = pb.DecodingParameters(
        repetition_penalty=given.repetition_penalty,
        regex=given.regex,
        grammar=given.grammar,
        format="JSON" if given.json_object else None,
    )
    if given.length_penalty is not None:
        message.length_penalty.start_index = given.length_penalty.start_index
        message.length_penalty.decay_factor = given.length_penalty.decay_factor
    if given.json_schema is not None:
        schema = given.json_schema
        message.json_schema = schema if isinstance(schema, str) else json.dumps(schema)
    if given.choices:
        message.choice.choices.extend(given.choices)
    return message


def read_generation(
    message: pb.GenerationResponse, token_ids: bool, report: CallReport = NO_REPORT
) -> Generation:
    return Generation(
        text=message.text,
        input_token_count=message.input_token_count,
        generated_token_count=message.generated_token_count,
        stop_reason=StopReason(message.stop_reason),
        stop_sequence=message.stop_sequence,
        seed=message.seed,
        tokens=tuple(_token(each, token_ids) for each in message.tokens),
        input_tokens=tuple(_token(each, token_ids) for each in message.input_tokens),
        report=report,
    )


def _token(token: pb.TokenInfo, is_id: bool) -> Token:
    top = tuple(TopToken(each.text, each.logprob, _id(each.text, is_id)) for each in token.top_tokens)
    return Token(token.text, token.logprob, token.rank, top, _id(token.text, is_id))


def _id(text: str, is_id: bool) -> int | None:
    return int(text) if is_id and text.isdecimal() else None


def read_tokenization(message: pb.TokenizeResponse, token_ids: bool) -> Tokenization:
    return Tokenization(
        token_count=message.token_count,
        tokens=tuple(message.tokens),
        offsets=tuple(Offset(each.start, each.end) for each in message.offsets),
        token_ids=tuple(map(int, message.tokens)) if token_ids else (),
    )


def read_model_info(message: pb.ModelInfoResponse) -> ModelInfo:
    return ModelInfo(ModelKind(message.model_kind), message.max_sequence_length, message.max_new_tokens)


def read_report(trailers: Iterable[tuple[str, str | bytes]]) -> CallReport:
    """Read the trailing metadata of a call. Other services send none of it."""
    texts = {key: text for key, text in trailers if isinstance(text, str)}
    keys = {name: "tgis-" + name.replace("_", "-") for name in _TRAILERS}
    values = {name: read(texts[keys[name]]) for name, read in _TRAILERS.items() if keys[name] in texts}
    return CallReport(**values)
