"""Checks that each input has one log line, with the right level and fields and without clients' texts."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, suppress
from dataclasses import replace

import pytest
from google.protobuf.message import Message

from tgis.logs import JsonFormatter, TextFormatter
from tgis.pb import generation_pb2 as pb
from tgis.router.api.fmaas.messages import read_batch, read_single
from tgis.router.api.fmaas.rules import FMAAS
from tgis.router.api.lmi.rules import LMI
from tgis.router.api.openai.rules import OPENAI
from tgis.router.engine.handle import SequenceSpec
from tgis.router.errors import (
    GenerationError,
    NotFoundError,
    OverloadedError,
    RequestError,
    RouterError,
    UnavailableError,
)
from tgis.router.events import InputTokens, Output, Timings
from tgis.router.requests.api_rules import ApiRules
from tgis.router.requests.call import GenerationCall
from tgis.router.requests.parameters import Parameters
from tgis.router.requests.request_log import CallLog, InputLog, correlation_id
from tgis.router.sequence import Stopping, StopReason
from tgis.sampling_parameters import Sampling

MARKER = "a-text-nobody-may-see"
TIMINGS = Timings(queue_s=0.25, first_token_s=0.5, total_s=1.0)
GREEDY = SequenceSpec((1, 2, 3), Stopping(max_new_tokens=9))
SAMPLED = SequenceSpec((1, 2, 3), Stopping(max_new_tokens=9), Sampling(greedy=False, seed=2**64 - 1))


class Lines(logging.Handler):
    """Log handler that keeps the lines in both formats."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.objects: list[dict[str, object]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(TextFormatter().format(record))
        self.objects.append(json.loads(JsonFormatter().format(record)))

    @property
    def messages(self) -> list[tuple[object, object]]:
        return [(line["level"], line["message"]) for line in self.objects]


@pytest.fixture
def lines() -> Iterator[Lines]:
    logger, handler = logging.getLogger("tgis.router.requests.request_log"), Lines()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)


Request = pb.BatchedGenerationRequest | pb.SingleGenerationRequest


def batch(*texts: str, **more: object) -> pb.BatchedGenerationRequest:
    return pb.BatchedGenerationRequest(requests=[pb.GenerationRequest(text=text) for text in texts], **more)


def single(text: str = "in", **more: object) -> pb.SingleGenerationRequest:
    return pb.SingleGenerationRequest(request=pb.GenerationRequest(text=text), **more)


def call_of(request: Request) -> GenerationCall:
    return read_single(request) if isinstance(request, pb.SingleGenerationRequest) else read_batch(request)


def output(text: str, number: int, reason: StopReason = StopReason.NOT_FINISHED) -> Output:
    is_last = reason is not StopReason.NOT_FINISHED
    return Output((text,), (), number, reason, "", TIMINGS if is_last else None, 2 if is_last else 0)


def finish(
    log: CallLog, reason: StopReason, *texts: str, index: int = 0, spec: SequenceSpec = GREEDY
) -> None:
    """Log one input from start to end, with one text per token."""
    with log.input(index, spec) as input_log:
        input_log.add(InputTokens(()))
        for number, text in enumerate(texts[:-1], 1):
            input_log.add(output(text, number))
        input_log.add(output(texts[-1], len(texts), reason))


def test_a_line_has_the_request_and_its_outcome(lines: Lines) -> None:
    params = pb.Parameters(
        method=pb.SAMPLE,
        sampling=pb.SamplingParameters(temperature=0.7, top_k=5, top_p=0.9, seed=3),
        stopping=pb.StoppingCriteria(
            max_new_tokens=20, stop_sequences=["x", "y"], include_stop_sequence=False, time_limit_millis=100
        ),
        response=pb.ResponseOptions(generated_tokens=True, top_n_tokens=2),
        decoding=pb.DecodingParameters(
            repetition_penalty=1.25,
            length_penalty=pb.DecodingParameters.LengthPenalty(start_index=1, decay_factor=1.5),
            regex="é+",
        ),
        truncate_input_tokens=4,
    )
    request = batch("né", prefix_id="prompt-1", adapter_id="adapter-1", params=params)
    log = CallLog(call_of(request), "client-7", request_id="request-7")
    log.accept()
    finish(log, StopReason.EOS_TOKEN, "a", "é", "", spec=SAMPLED)
    [fields] = lines.objects
    assert 0 <= fields.pop("validation_time_ms") <= fields.pop("total_time_ms") < 1000  # type: ignore[operator]
    fields.pop("timestamp")
    assert fields == {
        "level": "INFO",
        "logger": "tgis.router.requests.request_log",
        "message": "Request generated 3 tokens before EOS_TOKEN, output 3 bytes",
        "request_id": "request-7",
        "correlation_id": "client-7",
        "prefix_id": "prompt-1",
        "adapter_id": "adapter-1",
        "input_bytes": 3,
        "input_tokens": 3,
        "cached_tokens": 2,
        "output_tokens": 3,
        "stop_reason": "EOS_TOKEN",
        "queue_time_ms": 250.0,
        "inference_time_ms": 750.0,
        "time_per_token_ms": 250.0,
        "seed": 2**64 - 1,
        "params": (
            "method=SAMPLE, temperature=0.7, top_k=5, top_p=0.9, seed=3, max_new_tokens=20, "
            "time_limit_millis=100, stop_sequences=2, include_stop_sequence=false, generated_tokens=true, "
            "top_n_tokens=2, repetition_penalty=1.25, start_index=1, decay_factor=1.5, regex=3 bytes, "
            "truncate_input_tokens=4"
        ),
    }


def test_absent_fields_are_not_logged(lines: Lines) -> None:
    log = CallLog(call_of(single()))
    log.accept()
    with log.input(0, GREEDY) as input_log:
        input_log.add(Output((), (), 0, StopReason.TIME_LIMIT, timings=TIMINGS))
    [fields] = lines.objects
    assert fields["params"] == "method=GREEDY"
    assert fields["correlation_id"] == "<none>"
    assert not {"prefix_id", "adapter_id", "input", "seed", "time_per_token_ms", "tenant"} & fields.keys()
    assert fields["cached_tokens"] == 0


def test_a_tenant_is_named_and_a_salt_is_not(lines: Lines) -> None:
    call = replace(call_of(single()), tenant="t" * 200, parameters=Parameters(cache_salt=MARKER.encode()))
    for error in (None, RequestError("no")):
        log = CallLog(call)
        with suppress(RequestError), log:
            if error is not None:
                raise error
            log.accept()
            finish(log, StopReason.EOS_TOKEN, "")
    assert [line["tenant"] for line in lines.objects] == ["t" * 128] * 2
    assert MARKER not in "\n".join(lines.texts)


@pytest.mark.parametrize("reason", [reason for reason in StopReason if reason is not StopReason.NOT_FINISHED])
def test_levels(lines: Lines, reason: StopReason) -> None:
    log = CallLog(call_of(batch("a")))
    log.accept()
    finish(log, reason, "ab")
    special = {"CANCELLED": "WARNING", "TOKEN_LIMIT": "WARNING", "ERROR": "ERROR"}
    expected = f"Request generated 1 tokens before {reason.name}, output 2 bytes"
    assert lines.messages == [(special.get(reason.name, "INFO"), expected)]


def test_kinds(lines: Lines) -> None:
    for request, index in ((batch("a"), 0), (batch("a", "b"), 0), (batch("a", "b"), 1), (single(), 0)):
        log = CallLog(call_of(request))
        log.accept()
        finish(log, StopReason.MAX_TOKENS, "", index=index)
    kinds = [
        "Request",
        "Sub-request 1 from batch of 2",
        "Sub-request 2 from batch of 2",
        "Streaming response",
    ]
    said = "generated 1 tokens before MAX_TOKENS, output 0 bytes"
    assert lines.messages == [("INFO", f"{kind} {said}") for kind in kinds]


def test_a_line_is_about_its_own_input(lines: Lines) -> None:
    log = CallLog(call_of(batch("one", "three", "é" * 10)), text_chars=4)
    log.accept()
    for index in (2, 0, 1):
        finish(log, StopReason.MAX_TOKENS, "x", index=index)
    assert [line["input_bytes"] for line in lines.objects] == [20, 3, 5]
    assert [line["input"] for line in lines.objects] == ["éééé", "one", "thre"]
    assert len({line["request_id"] for line in lines.objects}) == 1


def test_as_much_text_is_shown_as_is_allowed(lines: Lines) -> None:
    log = CallLog(call_of(single("0123456789")), text_chars=5)
    log.accept()
    finish(log, StopReason.STOP_SEQUENCE, "ab", "é", "defgh", "ijk")
    [line] = lines.objects
    assert line["message"] == (
        "Streaming response generated 4 tokens before STOP_SEQUENCE, output 12 bytes: abéde"
    )
    assert line["input"] == "01234"


def fill(message: Message) -> None:
    """Set all text fields of a message and of its nested messages to MARKER."""
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if isinstance(value, str):
            setattr(message, field.name, MARKER)
        elif isinstance(value, Message):
            fill(value)
        elif field.message_type is not None:
            fill(value.add())
        elif field.cpp_type == field.CPPTYPE_STRING:
            value.append(MARKER)


@pytest.mark.parametrize("guided", ["json_schema", "regex", "choice", "grammar"])
@pytest.mark.parametrize("make", [batch, single])
def test_no_text_is_in_any_line(lines: Lines, guided: str, make: type) -> None:
    request = make("")
    fill(request)
    decoding = request.params.decoding
    if guided == "choice":
        decoding.choice.choices.append(MARKER)
    else:
        setattr(decoding, guided, MARKER)
    assert MARKER in str(decoding)
    request.prefix_id = request.adapter_id = "p"
    for error in (None, GenerationError("told"), KeyError(MARKER), asyncio.CancelledError(MARKER)):
        log = CallLog(call_of(request))
        with suppress(Exception, asyncio.CancelledError), log:
            if error is not None:
                raise error
        log.accept()
        with suppress(Exception, asyncio.CancelledError), log.input(0, SAMPLED) as input_log:
            input_log.add(output(MARKER, 1))
            if error is not None:
                raise error
            input_log.add(output(MARKER, 2, StopReason.MAX_TOKENS))
    assert len(lines.texts) == 7
    assert MARKER not in "\n".join(lines.texts)
    assert MARKER not in json.dumps(lines.objects)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RequestError("the text"), "INVALID_ARGUMENT"),
        (OverloadedError("the text"), "RESOURCE_EXHAUSTED"),
        (UnavailableError("the text"), "UNAVAILABLE"),
        (RouterError("the text"), "INTERNAL"),
    ],
)
def test_failures(lines: Lines, error: RouterError, code: str) -> None:
    for request in (single(), batch("a"), batch("a", "b")):
        with suppress(RouterError), CallLog(call_of(request)):
            raise error
    log = CallLog(call_of(batch("a", "bc")))
    with suppress(RouterError), log:
        log.accept()
        with log.input(1, GREEDY):
            raise error
    kinds = ["Streaming response", "Request", "Batch of 2", "Sub-request 2 from batch of 2"]
    assert lines.messages == [("ERROR", f"{kind} failed with {code}: the text") for kind in kinds]
    assert [line["code"] for line in lines.objects] == [code] * 4
    assert [line["input_bytes"] for line in lines.objects] == [2, 1, 2, 2]
    assert "validation_time_ms" not in lines.objects[0]


@pytest.mark.parametrize(
    ("api", "level", "code"),
    [
        (OPENAI, "WARNING", "NOT_FOUND"),
        (LMI, "WARNING", "INVALID_ARGUMENT"),
        (FMAAS, "ERROR", "INVALID_ARGUMENT"),
    ],
)
def test_a_missing_model_is_logged_by_the_status_of_its_api(
    lines: Lines, api: ApiRules, level: str, code: str
) -> None:
    with suppress(NotFoundError), CallLog(replace(call_of(single()), api=api)):
        raise NotFoundError("there is no such model")
    assert lines.messages == [(level, f"Streaming response failed with {code}: there is no such model")]
    assert lines.objects[0]["code"] == code


def test_the_cause_of_an_unexpected_error_is_not_shown(lines: Lines) -> None:
    log = CallLog(call_of(single()))
    log.accept()
    with suppress(ValueError), log.input(0, GREEDY):
        raise ValueError(MARKER)
    assert lines.messages == [("ERROR", "Streaming response failed with INTERNAL")]


def test_a_call_cancelled_before_its_inputs_began(lines: Lines) -> None:
    with suppress(asyncio.CancelledError), CallLog(call_of(batch("a", "b"))):
        raise asyncio.CancelledError
    assert lines.messages == [("WARNING", "Batch of 2 generated 0 tokens before CANCELLED, output 0 bytes")]


async def test_an_input_that_is_left_was_cancelled(lines: Lines) -> None:
    log = CallLog(call_of(single()))

    async def answers() -> AsyncIterator[Output]:
        log.accept()
        with log, log.input(0, GREEDY) as input_log:
            for number in range(1, 9):
                event = output("abc", number)
                input_log.add(event)
                yield event

    async with aclosing(answers()) as stream:  # type: ignore[type-var]
        await anext(stream)
        await anext(stream)
    said = "Streaming response generated 2 tokens before CANCELLED, output 6 bytes"
    assert lines.messages == [("WARNING", said)]
    assert not {"queue_time_ms", "cached_tokens"} & lines.objects[0].keys()


def test_events_after_the_end_are_not_logged(lines: Lines) -> None:
    log = CallLog(call_of(single()))
    log.accept()
    with suppress(asyncio.CancelledError), log, log.input(0, GREEDY) as input_log:
        input_log.add(output("x", 1, StopReason.MAX_TOKENS))
        raise asyncio.CancelledError
    assert [level for level, _ in lines.messages] == ["INFO"]


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ([], "<none>"),
        ([("user-agent", "x"), ("x-correlation-id-bin", b"x")], "<none>"),
        ([("x-correlation-id", "abc 1")], "abc 1"),
        ([("x-correlation-id", "")], ""),
        ([("x-correlation-id", "first"), ("x-correlation-id", "second")], "first"),
        ([("x-correlation-id", "é")], "<non-ascii>"),
        ([("x-correlation-id", "a\nb")], "<non-ascii>"),
        ([("x-correlation-id", b"\xff")], "<non-ascii>"),
        ([("x-correlation-id", "a" * 8000)], "a" * 128),
    ],
)
def test_correlation_ids(metadata: list[tuple[str, str | bytes]], expected: str) -> None:
    assert correlation_id(metadata, FMAAS) == expected


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ([("x-request-id", "request-1")], "request-1"),
        ([("x-request-id", "request-1"), ("x-correlation-id", "abc")], "abc"),
        ([("x-request-id", "é")], "<non-ascii>"),
        ([], "<none>"),
    ],
)
def test_a_request_id_stands_in_for_a_correlation_id_over_http(
    metadata: list[tuple[str, str]], expected: str
) -> None:
    assert correlation_id(metadata, OPENAI) == expected
    if "x-correlation-id" not in dict(metadata):
        assert correlation_id(metadata, FMAAS) == "<none>"


def test_a_line_of_a_call_over_http_names_api_path_and_model(lines: Lines) -> None:
    call = replace(call_of(single(MARKER)), api=OPENAI, method="Completion", model_id="m" * 200)
    log = CallLog(call, "c")
    log.accept()
    finish(log, StopReason.EOS_TOKEN, MARKER)
    [line] = lines.objects
    assert (line["api"], line["method"], line["model"]) == ("openai", "Completion", "m" * 128)
    assert MARKER not in "\n".join(lines.texts)


def test_ids_cannot_forge_and_are_shortened(lines: Lines) -> None:
    hostile = 'x" stop_reason=FORGED\n2026-01-01T00:00:00.000Z ERROR root: forged'
    log = CallLog(
        call_of(single(prefix_id=hostile, adapter_id="a" * 10_000)), 'c" level=ERROR', text_chars=99
    )
    log.accept()
    finish(log, StopReason.EOS_TOKEN, hostile)
    [text], [line] = lines.texts, lines.objects
    assert "\n" not in text
    assert line["prefix_id"] == hostile
    assert line["adapter_id"] == "a" * 128
    assert line["stop_reason"] == "EOS_TOKEN"
    assert text.endswith(f"total_time_ms={line['total_time_ms']}")
    assert r'prefix_id="x\" stop_reason=FORGED\n2026' in text


def test_unknown_values_of_parameters(lines: Lines) -> None:
    params = pb.Parameters(sampling=pb.SamplingParameters(temperature=float("nan"), top_p=float("-inf")))
    params.method = 77
    params.decoding.format = pb.DecodingParameters.JSON
    log = CallLog(call_of(single(params=params)))
    log.accept()
    finish(log, StopReason.EOS_TOKEN, "")
    assert lines.objects[0]["params"] == "method=77, temperature=nan, top_p=-inf, format=JSON"


def test_an_unread_log_line_is_cheap(lines: Lines) -> None:
    logging.getLogger("tgis.router.requests.request_log").setLevel(logging.CRITICAL)
    request, rounds = batch("text" * 1000), 2000
    last = output("x", 1, StopReason.MAX_TOKENS)
    log = CallLog(call_of(request))
    log.accept()

    def seconds() -> float:
        started = time.thread_time()
        for _ in range(rounds):
            with InputLog(log, 0, GREEDY) as input_log:
                input_log.add(last)
        return time.thread_time() - started

    assert min(seconds() for _ in range(5)) / rounds < 20e-6
    assert not lines.texts
    assert "params_text" not in vars(log)
