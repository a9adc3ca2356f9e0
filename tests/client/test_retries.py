"""Calls that fail: which are sent again, when, and how often, counted by a real service."""

import json
import time
from typing import Any

import grpc
import pytest
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2

from tests.support.blocking_clients import OpenClient
from tests.support.canned_service import WORDS, CannedService, serve
from tests.support.scripted_service import Failed, ScriptedService
from tgis_client import (
    NO_RETRIES,
    CallError,
    DeadlineError,
    InvalidRequestError,
    OverloadedError,
    RetryPolicy,
    SettingsError,
    UnauthenticatedError,
    UnavailableError,
)
from tgis_client.retries import Attempts

UNAVAILABLE, EXHAUSTED = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED
QUICK = RetryPolicy(initial_backoff_s=0.01)


def retry_info(seconds: float) -> tuple[tuple[str, bytes], ...]:
    """Encode a delay with Google's own messages."""
    delay = Duration(seconds=int(seconds), nanos=round(seconds % 1 * 1e9))
    details = [AnyMessage(type_url="type.googleapis.com/another.Message", value=b"\xff"), AnyMessage()]
    details[1].Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    status = status_pb2.Status(code=EXHAUSTED.value[0], message="busy", details=details)
    return (("grpc-status-details-bin", status.SerializeToString()),)


SENT_AGAIN = {
    "unavailable": ([Failed(UNAVAILABLE)], 0.0),
    "unavailable thrice": ([Failed(UNAVAILABLE)] * 3, 0.0),
    "RetryInfo": ([Failed(EXHAUSTED, retry_info(0.05))], 0.05),
    "pushback": ([Failed(EXHAUSTED, (("grpc-retry-pushback-ms", "50"),))], 0.05),
    "unavailable with pushback": ([Failed(UNAVAILABLE, (("grpc-retry-pushback-ms", "50"),))], 0.05),
    "retry-after": ([Failed(EXHAUSTED, (("retry-after", "0"),))], 0.0),
    "retry-after as a date of the past": (
        [Failed(EXHAUSTED, (("retry-after", "Sun, 06 Nov 1994 08:49:37 GMT"),))],
        0.0,
    ),
}


@pytest.mark.parametrize("case", SENT_AGAIN)
@pytest.mark.parametrize("is_stream", [False, True], ids=["unary", "stream"])
def test_calls_that_are_sent_again(open_client: OpenClient, case: str, is_stream: bool) -> None:
    failures, delay_s = SENT_AGAIN[case]
    service = ScriptedService(failures)
    with serve(service) as target, open_client(target, retry=QUICK) as client:
        started = time.monotonic()
        if is_stream:
            assert "".join(part.text for part in client.stream("a")) == "".join(WORDS)
        else:
            assert client.generate("a").text == "a: one two three"
        assert delay_s <= time.monotonic() - started < delay_s + 10
    assert len(service.asked) == len(failures) + 1
    assert all(request == service.asked[0] for request in service.asked)


SENT_ONCE: dict[str, tuple[Failed, type[CallError]]] = {
    "overloaded, no delay given": (Failed(EXHAUSTED), OverloadedError),
    "pushback forbids it": (Failed(UNAVAILABLE, (("grpc-retry-pushback-ms", "-1"),)), UnavailableError),
    "unreadable pushback": (Failed(UNAVAILABLE, (("grpc-retry-pushback-ms", "1s"),)), UnavailableError),
    "an hour's delay": (Failed(EXHAUSTED, retry_info(3600)), OverloadedError),
    "unreadable details": (Failed(EXHAUSTED, (("grpc-status-details-bin", b"\xff"),)), OverloadedError),
    "unreadable retry-after": (Failed(EXHAUSTED, (("retry-after", "soon"),)), OverloadedError),
    "invalid, with a delay": (Failed(grpc.StatusCode.INVALID_ARGUMENT, retry_info(0)), InvalidRequestError),
    "unauthenticated": (Failed(grpc.StatusCode.UNAUTHENTICATED), UnauthenticatedError),
    "deadline": (Failed(grpc.StatusCode.DEADLINE_EXCEEDED), DeadlineError),
    **{
        code.name: (Failed(code, retry_info(0)), CallError)
        for code in (
            grpc.StatusCode.INTERNAL,
            grpc.StatusCode.UNKNOWN,
            grpc.StatusCode.CANCELLED,
            grpc.StatusCode.ABORTED,
            grpc.StatusCode.DATA_LOSS,
        )
    },
}


@pytest.mark.parametrize("case", SENT_ONCE)
@pytest.mark.parametrize("is_stream", [False, True], ids=["unary", "stream"])
def test_calls_that_are_sent_once(open_client: OpenClient, case: str, is_stream: bool) -> None:
    failed, error = SENT_ONCE[case]
    service = ScriptedService([failed])
    with serve(service) as target, open_client(target, retry=QUICK) as client:
        with pytest.raises(error, match="as scripted") as caught:
            list(client.stream("a")) if is_stream else client.generate("a")
    assert (caught.value.code, caught.value.num_attempts) == (failed.code, 1)
    assert len(service.asked) == 1


def test_attempts_are_limited(open_client: OpenClient) -> None:
    for policy, num_attempts in ((QUICK, 4), (NO_RETRIES, 1)):
        service = ScriptedService([Failed(UNAVAILABLE)] * 9)
        with serve(service) as target, open_client(target, retry=policy) as client:
            with pytest.raises(UnavailableError) as caught:
                client.generate("a")
        assert caught.value.num_attempts == len(service.asked) == num_attempts


def test_no_attempt_begins_after_the_timeout(open_client: OpenClient) -> None:
    service = ScriptedService([Failed(EXHAUSTED, retry_info(50))])
    with serve(service) as target, open_client(target) as client:
        started = time.monotonic()
        with pytest.raises(OverloadedError) as caught:
            client.generate("a", timeout=40)
        assert time.monotonic() - started < 30
    assert (caught.value.retry_after_s, len(service.asked)) == (50, 1)


def test_the_timeout_holds_for_all_attempts_together(open_client: OpenClient) -> None:
    service = ScriptedService([Failed(UNAVAILABLE)] * 30, delay=0.1)
    policy = RetryPolicy(max_attempts=6, initial_backoff_s=0.01)
    with serve(service) as target, open_client(target, retry=policy) as client:
        with pytest.raises(CallError) as caught:
            client.generate("a", timeout=0.25)
        assert caught.value.code in (UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
    assert len(service.asked) <= 3


def test_later_attempts_have_less_time() -> None:
    attempts = Attempts(QUICK, 60.0)
    first_s = attempts.begin()
    time.sleep(0.05)
    later_s = attempts.begin()
    assert first_s is not None
    assert later_s is not None
    assert later_s <= first_s - 0.05


@pytest.mark.parametrize("num_messages", [0, 1])
def test_a_stream_that_ends_before_its_first_token_is_sent_again(
    open_client: OpenClient, num_messages: int
) -> None:
    """The caller sees each message once."""
    service = ScriptedService([Failed(UNAVAILABLE, num_messages=num_messages)])
    with serve(service) as target, open_client(target, retry=QUICK) as client:
        parts = list(client.stream("a"))
    assert [part.text for part in parts] == ["", *WORDS]
    assert len(service.asked) == 2


@pytest.mark.parametrize("trailers", [(), retry_info(0)], ids=["", "with RetryInfo"])
def test_a_stream_that_has_begun_is_never_sent_again(open_client: OpenClient, trailers: Any) -> None:
    service = ScriptedService([Failed(UNAVAILABLE, trailers, num_messages=2)])
    with serve(service) as target, open_client(target, retry=QUICK) as client:
        stream, texts = client.stream("a"), []
        with pytest.raises(UnavailableError):
            texts.extend(part.text for part in stream)
        assert stream.result.text == WORDS[0]
        assert list(stream) == []
    assert len(service.asked) == 1


def test_a_slow_service_is_left_at_the_timeout(open_client: OpenClient) -> None:
    with serve(CannedService(delay=3.0)) as target, open_client(target, timeout=0.15) as client:
        for call in (client.generate, lambda text: list(client.stream(text))):
            started = time.monotonic()
            with pytest.raises(DeadlineError):
                call("a")
            assert time.monotonic() - started >= 0.15


def service_config(**more: Any) -> str:
    policy = {
        "maxAttempts": 2,
        "initialBackoff": "0.01s",
        "maxBackoff": "0.01s",
        "backoffMultiplier": 1,
        "retryableStatusCodes": ["ABORTED"],
    }
    names = [{"service": "fmaas.GenerationService"}]
    return json.dumps({"methodConfig": [{"name": names, "retryPolicy": policy, **more}, {"name": [{}]}]})


def test_a_service_config_has_the_retries_and_the_timeout(open_client: OpenClient) -> None:
    aborted = grpc.StatusCode.ABORTED
    for code, num_calls in ((aborted, 2), (UNAVAILABLE, 1)):
        service = ScriptedService([Failed(code)] * 3)
        with serve(service) as target, open_client(target, service_config=service_config()) as client:
            with pytest.raises(CallError):
                client.generate("a")
        assert len(service.asked) == num_calls
    with serve(CannedService(delay=2.0)) as target:
        with open_client(target, service_config=service_config(timeout="0.2s")) as client:
            with pytest.raises(DeadlineError):
                client.generate("a")


@pytest.mark.parametrize("text", ["{", "[]", '{"methodConfig": [{"name": [{}], "timeout": "3"}]}', "7"])
def test_an_unreadable_service_config_is_refused_at_once(open_client: OpenClient, text: str) -> None:
    with pytest.raises(SettingsError, match="the service config cannot be read"):
        with open_client("localhost:1", service_config=text):
            pass


def test_delays_grow_to_their_maximum() -> None:
    policy = RetryPolicy(initial_backoff_s=0.1, max_backoff_s=1, backoff_multiplier=3)
    for num_attempts, expected in ((1, 0.1), (2, 0.3), (3, 0.9), (4, 1), (2**31, 1)):
        delays = [policy.backoff_s(num_attempts) for _ in range(50)]
        assert all(0.8 * expected <= delay <= 1.2 * expected for delay in delays)
        assert len(set(delays)) > 40
