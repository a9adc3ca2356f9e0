"""Tests the public service over a real socket: shapes, texts and codes, with tokens known in advance."""

import math
import time
from array import array
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tests.support.accounts import assert_nothing_left, take_baseline
from tests.support.router.expected_answers import expected_text, expected_tokens
from tests.support.router.fake_shard import EOS
from tests.support.router.http_port import get, metric
from tests.support.router.messages import PROMPT, batch, single, stopping
from tests.support.router.model_of_contents import Item
from tests.support.router.model_of_shard import integers
from tests.support.router.router_process import MAX_SEQUENCE_LENGTH, Setup
from tgis.pb import generation_pb2 as pb
from tgis.pb.orca_pb2 import OrcaLoadReportRequest
from tgis.pb.orca_pb2_grpc import OpenRcaServiceStub


def test_unary_answer(router: Setup) -> None:
    tokens = expected_tokens(router, PROMPT, 20)
    [response] = router.stub.Generate(batch(PROMPT)).responses
    assert response.text == expected_text(router, tokens)
    assert response.generated_token_count == len(tokens)
    assert response.input_token_count == len(router.tokenizer.encode(PROMPT).ids)
    assert response.stop_reason == (pb.EOS_TOKEN if tokens[-1] == EOS else pb.MAX_TOKENS)
    assert not response.tokens
    assert not response.input_tokens
    assert response.seed == 0


@pytest.mark.parametrize("text", ["a", "Once upon a time", "naïve café 東京 🙂", PROMPT * 3])
@pytest.mark.parametrize("stops", [(), ("e",), (" a", "the ", "xyz")])
@pytest.mark.parametrize("include", [True, False])
def test_stream_is_the_unary_answer_in_pieces(
    router: Setup, text: str, stops: tuple[str, ...], include: bool
) -> None:
    params = {
        "stopping": stopping(60, stop_sequences=stops, include_stop_sequence=include),
        "response": pb.ResponseOptions(generated_tokens=True, input_tokens=True, input_text=True),
    }
    [unary] = router.stub.Generate(batch(text, **params)).responses
    header, inputs, *rest = router.stub.GenerateStream(single(text, **params))
    assert header == pb.GenerationResponse(input_token_count=unary.input_token_count, text=text)
    assert inputs.input_tokens == unary.input_tokens
    assert header.text + "".join(part.text for part in rest) == unary.text
    assert [token for part in rest for token in part.tokens] == list(unary.tokens)
    counts = [part.generated_token_count for part in rest]
    assert counts == list(accumulate(len(part.tokens) for part in rest))
    assert counts[-1] == unary.generated_token_count
    assert all(part.stop_reason == pb.NOT_FINISHED for part in rest[:-1])
    assert (rest[-1].stop_reason, rest[-1].stop_sequence) == (unary.stop_reason, unary.stop_sequence)
    assert not any(part.input_token_count for part in rest)


def test_stop_sequence_cuts_the_text(router: Setup) -> None:
    whole = expected_text(router, expected_tokens(router, PROMPT, 60))
    stop = whole[6:9]
    first = whole.index(stop)
    for include in (True, False):
        criteria = stopping(60, stop_sequences=[stop], include_stop_sequence=include)
        [response] = router.stub.Generate(batch(PROMPT, stopping=criteria)).responses
        assert response.text == whole[: first + len(stop) if include else first]
        assert response.stop_reason == pb.STOP_SEQUENCE
        assert response.stop_sequence == stop


def test_batch_answers_in_order(router: Setup) -> None:
    texts = [f"{i} little girls had no bread" for i in range(40)]  # more than fit into one step
    answers = router.stub.Generate(batch(*texts, stopping=stopping(9))).responses
    assert [a.text for a in answers] == [
        expected_text(router, expected_tokens(router, text, 9)) for text in texts
    ]
    assert router.stub.Generate(pb.BatchedGenerationRequest()).responses == []


def test_input_tokens(router: Setup) -> None:
    options = pb.ResponseOptions(input_tokens=True, token_logprobs=True, token_ranks=True)
    [response] = router.stub.Generate(batch(PROMPT, response=options)).responses
    assert [token.text for token in response.input_tokens] == router.tokenizer.encode(PROMPT).tokens
    assert [token.rank for token in response.input_tokens] == list(range(len(response.input_tokens)))


def test_length_limit_reduces_silently(router: Setup) -> None:
    text = "quick brown " * 40
    num_inputs = len(router.tokenizer.encode(text).ids)
    room = MAX_SEQUENCE_LENGTH - num_inputs
    assert 0 < room < 150
    request = batch(text, stopping=stopping(150, min_new_tokens=0))
    [response] = router.stub.Generate(request).responses
    tokens = expected_tokens(router, text, room)
    assert response.generated_token_count == len(tokens)
    assert response.stop_reason == (pb.EOS_TOKEN if tokens[-1] == EOS else pb.TOKEN_LIMIT)


def test_truncation_keeps_the_end_behind_the_beginning_token(router: Setup) -> None:
    ids = router.tokenizer.encode(PROMPT).ids
    options = pb.ResponseOptions(input_tokens=True, input_text=True)
    request = batch(PROMPT, truncate_input_tokens=3, response=options)
    [response] = router.stub.Generate(request).responses
    pieces = [router.tokenizer.id_to_token(token) for token in [0, *ids[-2:]]]
    assert [token.text for token in response.input_tokens] == pieces
    assert response.input_token_count == 3
    assert response.text.startswith(PROMPT)


def test_seed_is_returned(router: Setup) -> None:
    params = {"method": pb.SAMPLE, "sampling": pb.SamplingParameters(seed=7)}
    header, *_, last = router.stub.GenerateStream(single(**params))
    assert (header.seed, last.seed) == (7, 7)
    responses = router.stub.Generate(batch("a", "b", method=pb.SAMPLE)).responses
    assert len({response.seed for response in responses}) == 2
    explicit_zero = {"method": pb.SAMPLE, "sampling": pb.SamplingParameters(temperature=0, seed=7)}
    assert router.stub.Generate(batch("a", **explicit_zero)).responses[0].seed == 0


SAMPLE = {"method": pb.SAMPLE}
STOPS = "can specify at most 6 non-empty stop sequences, each not more than 240 UTF8 bytes"
DETAIL = "must request input and/or generated tokens to request extra token detail"
NAN, INF = math.nan, math.inf
REJECTED = [
    *[
        (SAMPLE | {"sampling": pb.SamplingParameters(temperature=value)}, "temperature must be >= 0.05")
        for value in (0.01, -1, NAN, INF)
    ],
    *[
        (SAMPLE | {"sampling": pb.SamplingParameters(top_p=value)}, "top_p must be > 0.0 and <= 1.0")
        for value in (-0.1, 1.01, NAN, INF)
    ],
    *[
        (SAMPLE | {"sampling": pb.SamplingParameters(typical_p=value)}, "typical_p must be <= 1.0")
        for value in (1.5, NAN, INF, -INF)
    ],
    (SAMPLE | {"sampling": pb.SamplingParameters(top_k=2**31)}, "top_k must be strictly positive"),
    ({"stopping": stopping(2**32 - 1)}, f"max_new_tokens must be <= {MAX_SEQUENCE_LENGTH - 1}"),
    ({"stopping": pb.StoppingCriteria(min_new_tokens=21)}, "min_new_tokens must be <= max_new_tokens"),
    *[
        ({"decoding": pb.DecodingParameters(repetition_penalty=value)}, "repetition_penalty must be > 0.0")
        for value in (-1, NAN, INF)
    ],
    *[
        (
            {"decoding": pb.DecodingParameters(length_penalty={"decay_factor": value})},
            "length_penalty must be >= 1.0 and <= 10.0",
        )
        for value in (0, 0.9, 11, NAN)
    ],
    ({"stopping": pb.StoppingCriteria(stop_sequences=["a"] * 7)}, STOPS),
    ({"stopping": pb.StoppingCriteria(stop_sequences=[""])}, STOPS),
    ({"stopping": pb.StoppingCriteria(stop_sequences=["é" * 121])}, STOPS),
    ({"stopping": pb.StoppingCriteria(stop_sequences=["x" * 1_000_000])}, STOPS),
    ({"response": pb.ResponseOptions(token_logprobs=True)}, DETAIL),
    ({"response": pb.ResponseOptions(top_n_tokens=2)}, DETAIL),
    (
        {"response": pb.ResponseOptions(top_n_tokens=11, generated_tokens=True)},
        "top_n_tokens (11) must be <= 10",
    ),
]


@pytest.mark.parametrize(("params", "text"), REJECTED)
def test_rejections(router: Setup, params: dict[str, object], text: str) -> None:
    with pytest.raises(grpc.RpcError) as unary:
        router.stub.Generate(batch(PROMPT, PROMPT, **params))
    with pytest.raises(grpc.RpcError) as stream:
        list(router.stub.GenerateStream(single(**params)))
    for error in (unary.value, stream.value):
        assert (error.code(), error.details()) == (grpc.StatusCode.INVALID_ARGUMENT, text)


def test_greedy_ignores_sampling_parameters(router: Setup) -> None:
    nonsense = pb.SamplingParameters(temperature=-5, top_p=9, typical_p=9, top_k=2**32 - 1)
    assert router.stub.Generate(batch(PROMPT, sampling=nonsense)).responses


def test_rejections_that_need_the_tokens(router: Setup) -> None:
    long = "fox " * 300
    num_inputs = len(router.tokenizer.encode(long).ids)
    cases = [
        (
            batch("ok", long),
            f"input tokens ({num_inputs}) plus prefix length (0) must be < {MAX_SEQUENCE_LENGTH}",
        ),
        (
            batch(long, truncate_input_tokens=150, stopping=stopping(100, min_new_tokens=51)),
            "input tokens (150) plus prefix length (0) plus min_new_tokens (51) must be <= 200",
        ),
    ]
    for request, text in cases:
        with pytest.raises(grpc.RpcError) as caught:
            router.stub.Generate(request)
        assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.INVALID_ARGUMENT, text)


def test_unknown_prompt_and_adapter(router: Setup) -> None:
    cases = {
        "prefix_id": "can't retrieve prompt prefix with id 'nobody': prefix id \"nobody\" not found",
        "adapter_id": "can't retrieve adapter with id 'nobody': directory does not exist",
    }
    for name, text in cases.items():
        request = batch(PROMPT)
        setattr(request, name, "nobody")
        with pytest.raises(grpc.RpcError) as caught:
            router.stub.Generate(request)
        assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.INVALID_ARGUMENT, text)


def test_stream_without_request(router: Setup) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        list(router.stub.GenerateStream(pb.SingleGenerationRequest()))
    assert (caught.value.code(), caught.value.details()) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "missing request",
    )


def test_time_limit_returns_the_tokens_so_far(router: Setup) -> None:
    router.shards[0].step_s = 0.05
    try:
        started = time.monotonic()
        criteria = stopping(190, min_new_tokens=190, time_limit_millis=300)
        [response] = router.stub.Generate(batch("a", stopping=criteria)).responses
        assert time.monotonic() - started > 0.3
    finally:
        router.shards[0].step_s = 0.001
    assert response.stop_reason == pb.TIME_LIMIT
    assert 0 < response.generated_token_count < 100
    tokens = expected_tokens(router, "a", response.generated_token_count)
    if EOS not in tokens:
        assert response.text == expected_text(router, tokens)


LONG = "girl fox " * 30
ONE_MILLISECOND = stopping(20, min_new_tokens=20, time_limit_millis=1)


def test_an_idle_service_gives_a_token_whatever_the_time_limit(router: Setup) -> None:
    """As in TGIS, each input of a call gets one token, however late the deadline is noticed."""
    router.shards[0].step_s = 0.005
    try:
        for _ in range(40):
            texts = ("a", PROMPT, LONG, LONG)
            responses = router.stub.Generate(batch(*texts, stopping=ONE_MILLISECOND)).responses
            *_, last = router.stub.GenerateStream(single(stopping=ONE_MILLISECOND))
            ends = [(each.generated_token_count, each.stop_reason) for each in (*responses, last)]
            assert ends == [(1, pb.TIME_LIMIT)] * 5
    finally:
        router.shards[0].step_s = 0.001
    [first] = expected_tokens(router, PROMPT, 1)
    assert responses[1].text == expected_text(router, [first])


def test_a_deadline_that_has_passed_before_the_input_is_accepted(router: Setup) -> None:
    """The deadline passes while the soft prompt is loaded."""
    router.library.put(Item("slow", 3), "slow")
    router.library.load_s = 0.05
    try:
        request = batch("a", stopping=ONE_MILLISECOND)
        request.prefix_id = "slow"
        [response] = router.stub.Generate(request).responses
    finally:
        router.library.load_s = 0.0
    assert (response.generated_token_count, response.stop_reason) == (1, pb.TIME_LIMIT)


def test_a_deadline_behind_a_full_batch_ends_the_wait(router: Setup) -> None:
    timeouts = 'tgi_request_failure{err="timeout"}'
    before = metric(router, timeouts)
    router.shards[0].step_s = 0.1
    try:
        crowd = batch(*["a"] * 16, stopping=stopping(25, min_new_tokens=25))
        ahead = router.stub.Generate.future(crowd)
        deadline = time.monotonic() + 30
        while metric(router, "tgi_batch_current_size") < 16:
            assert time.monotonic() < deadline
        [response] = router.stub.Generate(batch("late", stopping=ONE_MILLISECOND)).responses
        header, last = router.stub.GenerateStream(single("late", stopping=ONE_MILLISECOND))
    finally:
        router.shards[0].step_s = 0.001
    count = len(router.tokenizer.encode("late").ids)
    assert response == pb.GenerationResponse(input_token_count=count, stop_reason=pb.TIME_LIMIT)
    assert (header.input_token_count, last) == (count, pb.GenerationResponse(stop_reason=pb.TIME_LIMIT))
    assert metric(router, timeouts) == before + 2
    assert len(ahead.result(30).responses) == 16


def test_more_inputs_than_permits_are_refused_at_once(router: Setup) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        router.stub.Generate(batch(*["a"] * 513))
    assert (caught.value.code(), caught.value.details()) == (
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "Model is overloaded",
    )
    assert len(router.stub.Generate(batch(*["a"] * 512, stopping=stopping(1))).responses) == 512


def test_tokenize(router: Setup) -> None:
    text = "naïve café 🙂 fox"
    encoding = router.tokenizer.encode(text)
    request = pb.BatchedTokenizeRequest(
        requests=[pb.TokenizeRequest(text=text)], return_tokens=True, return_offsets=True
    )
    [response] = router.stub.Tokenize(request).responses
    assert response.token_count == len(encoding.ids)
    assert list(response.tokens) == encoding.tokens
    for offset, (start, end) in zip(response.offsets, encoding.offsets, strict=True):
        assert text.encode()[offset.start : offset.end].decode() == text[start:end]
    request.truncate_input_tokens = 4
    [last] = router.stub.Tokenize(request).responses
    assert (last.token_count, list(last.tokens)) == (4, encoding.tokens[-4:])
    assert list(last.offsets) == list(response.offsets)[-4:]
    assert router.stub.Tokenize(pb.BatchedTokenizeRequest()).responses == []


def test_model_info(router: Setup) -> None:
    info = router.stub.ModelInfo(pb.ModelInfoRequest(model_id="anything"))
    assert info.model_kind == pb.ModelInfoResponse.DECODER_ONLY
    assert (info.max_sequence_length, info.max_new_tokens) == (MAX_SEQUENCE_LENGTH, MAX_SEQUENCE_LENGTH - 1)


def test_bytes_that_are_no_message(router: Setup) -> None:
    call = router.channel.unary_unary("/fmaas.GenerationService/Generate")
    with pytest.raises(grpc.RpcError) as caught:
        call(b"\xff\xff\xff\x01garbage")
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details() == "the request could not be decoded"


@pytest.mark.parametrize(
    "path",
    [
        "/fmaas.GenerationService/Chat",
        "/fmaas.Generation/Generate",
        "/grpc.health.v1.Health/Ask",
        "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
        "/nothing",
    ],
)
def test_an_unknown_method_is_refused_without_a_text(router: Setup, path: str) -> None:
    """tonic, TGIS's server library, refuses it likewise, whatever the client sends and waits for."""
    unary, stream = router.channel.unary_unary(path), router.channel.unary_stream(path)
    joined, both = router.channel.stream_unary(path), router.channel.stream_stream(path)
    calls = [lambda: unary(b""), lambda: list(stream(b"\xff")), lambda: joined(iter([]))]
    calls.append(lambda: list(both(iter([b"a", b"b"]))))
    for call in calls:
        with pytest.raises(grpc.RpcError) as caught:
            call()
        assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.UNIMPLEMENTED, "")
        assert not caught.value.trailing_metadata()


def test_parameters_from_metadata_reach_the_shards(router: Setup) -> None:
    """The watermark has the server's default strength."""
    model, opened = router.shards[0].model, []
    model.refuses = lambda message: opened.append(message) or False  # type: ignore[func-returns-value]
    try:
        metadata = [("tgis-logit-bias", "17:-100,42:1.5"), ("tgis-watermark", "true"), ("tgis-min-p", "0.25")]
        metadata += [("tgis-presence-penalty", "1"), ("tgis-frequency-penalty", "-0.5")]
        metadata += [("tgis-stop-token-ids", "9,8"), ("tgis-ignore-eos", "true")]
        call = router.stub.Generate.with_call(batch(PROMPT, stopping=stopping(1)), metadata=metadata)[1]
    finally:
        model.refuses = lambda message: False
    [row] = opened
    assert integers(row.sampling.bias_token_ids) == [17, 42]
    assert array("f", row.sampling.biases).tolist() == [-100, 1.5]
    assert (row.sampling.watermark_gamma, row.sampling.watermark_delta) == (0.5, 2)
    assert (row.sampling.presence_penalty, row.sampling.frequency_penalty) == (1, -0.5)
    assert integers(row.eos_token_ids) == [8, 9]
    assert dict(call.trailing_metadata())["tgis-generated-tokens"] == "1"


def test_uncomputed_blocks_of_a_refused_row_are_not_shared(router: Setup) -> None:
    model, text = router.shards[0].model, "a girl whose text nobody else has"
    model.refuses = lambda message: True
    try:
        with pytest.raises(grpc.RpcError) as caught:
            router.stub.Generate(batch(text))
        assert caught.value.code() is grpc.StatusCode.INTERNAL
    finally:
        model.refuses = lambda message: False
    [response] = router.stub.Generate(batch(text)).responses
    assert response.text == expected_text(router, expected_tokens(router, text, 20))
    assert router.shards[0].num_streams == 1, "an assertion of the model ended a stream"


def test_health_and_reflection(router: Setup) -> None:
    health = health_pb2_grpc.HealthStub(router.channel)
    for name in ("", "fmaas.GenerationService"):
        response = health.Check(health_pb2.HealthCheckRequest(service=name))
        assert response.status == health_pb2.HealthCheckResponse.SERVING
    with pytest.raises(grpc.RpcError) as caught:
        health.Check(health_pb2.HealthCheckRequest(service="nobody"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    reflection = reflection_pb2_grpc.ServerReflectionStub(router.channel)
    ask = reflection_pb2.ServerReflectionRequest(list_services="")
    [answer] = reflection.ServerReflectionInfo(iter([ask]))
    names = {service.name for service in answer.list_services_response.service}
    assert {"fmaas.GenerationService", "xds.service.orca.v3.OpenRcaService"} <= names
    report = next(OpenRcaServiceStub(router.channel).StreamCoreMetrics(OrcaLoadReportRequest()))
    assert report.named_metrics["num_requests_waiting"] == 0


def test_http(router: Setup) -> None:
    assert get(router.http + "/health") == (200, "")
    assert get(router.http + "/live") == (200, "")
    assert get(router.http + "/other")[0] == 404
    before = metric(router, 'tgi_request_count{kind="single"}')
    router.stub.Generate(batch("a"))
    assert metric(router, 'tgi_request_count{kind="single"}') == before + 1
    assert metric(router, 'tgi_request_count_total{kind="single"}') == before + 1


def test_cancelled_calls_leave_nothing_behind(router: Setup) -> None:
    baseline = take_baseline(router.http)
    router.shards[0].step_s = 0.01

    def cancel(i: int) -> None:
        request = single(f"girl {i}", stopping=stopping(150, min_new_tokens=150))
        if i % 2:
            call = router.stub.GenerateStream(request)
            for _ in range(i % 7):
                next(call)
            call.cancel()
        else:
            unary = router.stub.Generate.future(
                batch(f"a {i}", "b", stopping=stopping(150, min_new_tokens=150))
            )
            time.sleep(0.003 * (i % 11))
            unary.cancel()

    try:
        with ThreadPoolExecutor(16) as threads:
            list(threads.map(cancel, range(60)))
        assert_nothing_left(router.http, baseline)
    finally:
        router.shards[0].step_s = 0.001
    assert len(router.stub.Generate(batch(*["a"] * 512, stopping=stopping(1))).responses) == 512


def test_a_gone_deadline_ends_the_work(router: Setup) -> None:
    router.shards[0].step_s = 0.05
    try:
        with pytest.raises(grpc.RpcError) as caught:
            router.stub.Generate(batch("a", stopping=stopping(190, min_new_tokens=190)), timeout=0.3)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        deadline = time.monotonic() + 30
        while metric(router, "tgi_requests_running"):
            assert time.monotonic() < deadline
        time.sleep(0.3)  # for the steps in flight
        num_steps = router.shards[0].num_steps
        time.sleep(0.3)
        assert router.shards[0].num_steps == num_steps
    finally:
        router.shards[0].step_s = 0.001
