"""What the client sends for each argument, and what it reads from each answer."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.blocking_clients import OpenClient
from tests.support.canned_service import WORDS, CannedService, serve
from tgis.pb import generation_pb2 as pb
from tgis_client import (
    CallError,
    CallReport,
    ClientError,
    LengthPenalty,
    ModelInfo,
    ModelKind,
    Offset,
    Parameters,
    SettingsError,
    StopReason,
    Token,
    TopToken,
)

ALL = Parameters(
    max_new_tokens=9,
    min_new_tokens=3,
    time_limit_millis=700,
    stop_sequences=["a", "b"],
    include_stop_sequence=False,
    stop_token_ids=(6, 5),
    ignore_eos=True,
    truncate_input_tokens=7,
    temperature=0.0,
    top_k=5,
    top_p=0.5,
    typical_p=0.25,
    min_p=0.05,
    seed=2**64 - 1,
    repetition_penalty=1.5,
    presence_penalty=-0.5,
    frequency_penalty=2,
    length_penalty=LengthPenalty(3, 1.25),
    logit_bias={17: -100, 42: 1e-3},
    watermark=True,
    json_schema={"type": "object"},
    input_text=True,
    tokens=True,
    input_tokens=True,
    logprobs=True,
    ranks=True,
    top_n_tokens=2,
)
ALL_SENT = pb.Parameters(
    method=pb.SAMPLE,
    sampling=pb.SamplingParameters(temperature=0, top_k=5, top_p=0.5, typical_p=0.25, seed=2**64 - 1),
    stopping=pb.StoppingCriteria(
        max_new_tokens=9,
        min_new_tokens=3,
        time_limit_millis=700,
        stop_sequences=["a", "b"],
        include_stop_sequence=False,
    ),
    response=pb.ResponseOptions(
        input_text=True,
        generated_tokens=True,
        input_tokens=True,
        token_logprobs=True,
        token_ranks=True,
        top_n_tokens=2,
    ),
    decoding=pb.DecodingParameters(
        repetition_penalty=1.5,
        length_penalty=pb.DecodingParameters.LengthPenalty(start_index=3, decay_factor=1.25),
        json_schema='{"type": "object"}',
    ),
    truncate_input_tokens=7,
)
ALL_METADATA = {
    "tgis-logit-bias": "17:-100.0,42:0.001",
    "tgis-min-p": "0.05",
    "tgis-presence-penalty": "-0.5",
    "tgis-frequency-penalty": "2.0",
    "tgis-stop-token-ids": "6,5",
    "tgis-ignore-eos": "true",
    "tgis-watermark": "true",
    "tgis-priority": "-3",
    "tgis-cache-salt-bin": "é".encode(),
    "tgis-input": "ids",
    "tgis-tokens": "ids",
    "authorization": "Bearer t",
    "traceparent": "00-1-2-01",
    "x-more": "1",
}
ARGUMENTS: dict[str, Any] = {
    "model_id": "m",
    "prefix_id": "p",
    "adapter_id": "q",
    "priority": -3,
    "cache_salt": "é",
    "token_ids": True,
    "trace_context": {"Traceparent": "00-1-2-01"},
    "metadata": [("x-more", "1")],
}


@pytest.fixture
def service() -> CannedService:
    return CannedService(trailers=(("tgis-queue-ms", "0.512"), ("tgis-cached-tokens", "16"), ("other", "x")))


@pytest.fixture
def target(service: CannedService) -> Iterator[str]:
    with serve(service) as address:
        yield address


def sent(metadata: dict[str, str | bytes]) -> dict[str, str | bytes]:
    return {key: value for key, value in metadata.items() if key != "user-agent"}


def test_every_argument_is_sent(open_client: OpenClient, service: CannedService, target: str) -> None:
    with open_client(target, token="t") as client:
        client.generate([5, 6], ALL, **ARGUMENTS)
        list(client.stream([5, 6], ALL, **ARGUMENTS))
    unary, stream = service.asked
    prompt = pb.GenerationRequest(text="5 6")
    ids = {"model_id": "m", "prefix_id": "p", "adapter_id": "q", "params": ALL_SENT}
    assert unary == pb.BatchedGenerationRequest(requests=[prompt], **ids)
    assert stream == pb.SingleGenerationRequest(request=prompt, **ids)
    assert list(map(sent, service.metadata)) == [ALL_METADATA] * 2


def test_nothing_else_is_sent(open_client: OpenClient, service: CannedService, target: str) -> None:
    with open_client(target) as client:
        client.generate("a")
        client.tokenize(["a"])
        client.model_info()
    requests = [pb.GenerationRequest(text="a")]
    request = service.asked[0]
    assert request.params == pb.Parameters(
        sampling=pb.SamplingParameters(),
        stopping=pb.StoppingCriteria(),
        response=pb.ResponseOptions(),
        decoding=pb.DecodingParameters(),
    )
    request.ClearField("params")
    assert request == pb.BatchedGenerationRequest(requests=requests)
    assert service.asked[1] == pb.BatchedTokenizeRequest(
        requests=[pb.TokenizeRequest(text="a")], return_tokens=True
    )
    assert service.asked[2] == pb.ModelInfoRequest()
    assert list(map(sent, service.metadata)) == [{}] * 3


CONSTRAINTS: dict[str, tuple[Any, pb.DecodingParameters]] = {
    "regex": ("a+", pb.DecodingParameters(regex="a+")),
    "json_schema": ("{}", pb.DecodingParameters(json_schema="{}")),
    "grammar": ("g", pb.DecodingParameters(grammar="g")),
    "choices": (
        ["a", "b"],
        pb.DecodingParameters(choice=pb.DecodingParameters.StringChoices(choices=["a", "b"])),
    ),
    "json_object": (True, pb.DecodingParameters(format=pb.DecodingParameters.JSON)),
}


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_constraints(open_client: OpenClient, service: CannedService, target: str, name: str) -> None:
    value, expected = CONSTRAINTS[name]
    with open_client(target) as client:
        client.generate("a", Parameters(**{name: value}))
    assert service.asked[0].params.decoding == expected
    for other in CONSTRAINTS.keys() - {name}:
        with pytest.raises(SettingsError, match="exclude each other"):
            Parameters(**{name: value, other: CONSTRAINTS[other][0]})


@pytest.mark.parametrize("name", ["stop_sequences", "choices"])
def test_one_text_is_not_taken_for_several(name: str) -> None:
    with pytest.raises(SettingsError, match="not one text"):
        Parameters(**{name: "abc"})


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("max_new_tokens", -5, "max_new_tokens must be >= 0 and <= 4294967295, not -5"),
        ("seed", 2**64, f"seed must be >= 0 and <= {2**64 - 1}, not {2**64}"),
        ("top_k", "many", "top_k must be an integer, not 'many'"),
        ("top_n_tokens", 1.5, "top_n_tokens must be an integer, not 1.5"),
        ("temperature", "1", "temperature must be a number, not '1'"),
        ("min_p", [1], "min_p must be a number, not [1]"),
        (
            "length_penalty",
            LengthPenalty(-1, 1.0),
            "length_penalty.start_index must be >= 0 and <= 4294967295, not -1",
        ),
        ("length_penalty", LengthPenalty(1, "x"), "length_penalty.decay_factor must be a number, not 'x'"),  # type: ignore[arg-type]
    ],
)
def test_numbers_that_no_field_can_hold(name: str, value: Any, text: str) -> None:
    with pytest.raises(SettingsError) as caught:
        Parameters(**{name: value})
    assert str(caught.value) == text


def test_texts_that_no_field_can_hold(open_client: OpenClient, target: str) -> None:
    with open_client(target) as client, pytest.raises(SettingsError, match="the parameters cannot be sent"):
        client.generate("a", Parameters(regex="\ud800"))


def test_it_samples_if_a_parameter_of_sampling_is_set() -> None:
    for name in ("temperature", "top_k", "top_p", "typical_p", "min_p", "seed"):
        assert Parameters(**{name: 0}).is_sampling
        assert not Parameters(**{name: 0}, sample=False).is_sampling
    assert not Parameters(presence_penalty=1, repetition_penalty=2).is_sampling
    assert Parameters(sample=True).is_sampling


def test_results_have_every_value(open_client: OpenClient, target: str) -> None:
    parameters = Parameters(tokens=True)
    with open_client(target) as client:
        first, second = client.generate_batch(["a", "b"], parameters)
        stream = client.stream("a", parameters)
        parts = list(stream)
        [tokens] = client.tokenize(["aé"], offsets=True)
        info = client.model_info()
    report = CallReport(queue_ms=0.512, cached_tokens=16)
    assert (first.text, second.text) == ("a: one two three", "b: one two three")
    assert first.report == second.report == stream.result.report == report
    assert (first.input_token_count, first.generated_token_count) == (4, 3)
    assert first.stop_reason is StopReason.MAX_TOKENS
    assert first.tokens[1] == Token(" two", -1.0, 2, (TopToken(" two", -0.5), TopToken("\n", -2.25)))
    assert [part.text for part in parts] == ["", *WORDS]
    assert (stream.result.text, stream.result.seed, stream.result.tokens) == (
        "one two three",
        7,
        first.tokens,
    )
    assert (stream.result.input_token_count, stream.result.stop_reason) == (4, StopReason.MAX_TOKENS)
    assert (tokens.token_count, tokens.tokens) == (2, ("a", "é"))
    assert tokens.offsets == (Offset(0, 1), Offset(1, 3))
    assert info == ModelInfo(ModelKind.DECODER_ONLY, 512, 128)


def test_token_ids_are_numbers(open_client: OpenClient, target: str) -> None:
    with open_client(target) as client:
        [result] = client.tokenize(["57"], token_ids=True)
        plain = client.generate("a", Parameters(tokens=True), token_ids=True)
    assert result.token_ids == (5, 7)
    assert [token.id for token in plain.tokens] == [None] * 3, "the canned tokens are no numbers"


def test_unknown_reasons_are_no_error() -> None:
    assert StopReason(99) is StopReason.UNKNOWN
    assert {reason.name: reason.value for reason in StopReason if reason >= 0} == dict(pb.StopReason.items())
    kinds = {kind.name: kind.value for kind in ModelKind if kind is not ModelKind.UNKNOWN}
    assert kinds == dict(pb.ModelInfoResponse.ModelKind.items())


def test_the_token_file_is_read_for_each_call(
    open_client: OpenClient, service: CannedService, target: str, tmp_path: Path
) -> None:
    file = tmp_path / "token"
    file.write_text("first\nanother\n")
    with open_client(target, token_path=file) as client:
        client.model_info()
        file.write_text("second\n")
        client.model_info()
        file.unlink()
        with pytest.raises(SettingsError, match="the token's file cannot be read"):
            client.model_info()
    assert [each["authorization"] for each in service.metadata] == ["Bearer first", "Bearer second"]


@pytest.mark.parametrize("token", ["", "two\nlines", "é"])
def test_wrong_tokens_are_refused_at_once(open_client: OpenClient, token: str) -> None:
    with pytest.raises(SettingsError, match="printable ASCII"), open_client("localhost:1", token=token):
        pass


def test_wrong_prompts_never_reach_the_service(
    open_client: OpenClient, service: CannedService, target: str
) -> None:
    with open_client(target) as client:
        for prompts in (["a", [5]], "text"):
            with pytest.raises(SettingsError):
                client.generate_batch(prompts)
        with pytest.raises(SettingsError):
            client.generate("a", timeout=-1)
    assert service.asked == []


def test_the_current_span_is_passed_on(open_client: OpenClient, service: CannedService, target: str) -> None:
    from opentelemetry import trace

    context = trace.SpanContext(0x1234, 0x56, is_remote=False, trace_flags=trace.TraceFlags(1))
    with open_client(target) as client, trace.use_span(trace.NonRecordingSpan(context)):
        client.model_info()
        client.model_info(trace_context={})
    parents = [each.get("traceparent") for each in service.metadata]
    assert parents == [f"00-{0x1234:032x}-{0x56:016x}-01", None]


def test_a_closed_stream_is_cancelled(open_client: OpenClient) -> None:
    left = threading.Event()

    class Watching(CannedService):
        def GenerateStream(self, request: Any, context: Any) -> Iterator[pb.GenerationResponse]:
            context.add_callback(left.set)
            yield from super().GenerateStream(request, context)

    with serve(Watching(delay=0.3)) as target, open_client(target) as client:
        stream = client.stream("a")
        next(stream)
        next(stream)
        assert not left.is_set()
        stream.close()
        assert left.wait(0.25)
        assert list(stream) == []
        assert stream.result.text == "one"


def test_a_closed_client_makes_no_calls() -> None:
    from tgis_client import Client

    client = Client("localhost:1")
    client.close()
    with pytest.raises(ClientError, match="closed"):
        client.model_info()


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_client_that_is_closed_before_a_call_is_sent_ends_it(is_stream: bool, tmp_path: Path) -> None:
    """The call, in another thread, has its channel, and waits for its token in a pipe."""
    from tgis_client import Client

    path, ends = tmp_path / "token", list[BaseException]()
    path.write_text("token")
    client = Client("localhost:1", token_path=path)

    def call() -> None:
        try:
            if is_stream:
                list(client.stream("a"))
            else:
                client.model_info()
        except Exception as error:
            ends.append(error)

    path.unlink()
    os.mkfifo(path)
    caller = threading.Thread(target=call)
    caller.start()
    with path.open("w") as token:
        client.close()
        token.write("token")
    caller.join()
    [end] = ends
    assert isinstance(end, CallError)
    assert str(end) == "CANCELLED: the client was closed"


def test_messages_are_in_a_pool_of_their_own() -> None:
    """A program with other stubs of the same messages can use the client."""
    from tgis_client.pb import generation_pb2 as own

    assert own.Parameters.DESCRIPTOR.full_name == pb.Parameters.DESCRIPTOR.full_name == "fmaas.Parameters"
    assert own.Parameters.DESCRIPTOR.file.pool is not pb.Parameters.DESCRIPTOR.file.pool
    assert "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION" not in os.environ
