"""The client with a real router: its answers, and its calls while the service is lost, full, or drained."""

import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.accounts import scrape
from tests.support.blocking_clients import CLIENTS, OpenClient
from tests.support.router.messages import batch, stopping
from tests.support.router.proxy import Proxy
from tests.support.router.router_process import Setup, start_router, stop_router, stop_shards
from tgis_client import (
    NO_RETRIES,
    Client,
    DeadlineError,
    InvalidRequestError,
    OverloadedError,
    Parameters,
    RetryPolicy,
    SettingsError,
    StopReason,
    TooLargeError,
    UnavailableError,
)
from tgis_client.connection import read_target

PROMPT = "The quick brown fox"
DETAILS = Parameters(
    max_new_tokens=6, tokens=True, input_tokens=True, logprobs=True, ranks=True, top_n_tokens=2, seed=3
)


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    setup = start_router(tmp_path_factory.mktemp("router"), 1, "--max-concurrent-requests", "4")
    yield setup
    assert stop_router(setup) == 0


def target_of(router: Setup) -> str:
    return f"127.0.0.1:{router.service.grpc_port}"


def test_results_are_those_of_the_stub(open_client: OpenClient, router: Setup) -> None:
    with open_client(target_of(router)) as client:
        generation = client.generate(PROMPT, DETAILS)
        stream = client.stream(PROMPT, DETAILS)
        list(stream)
    options = {"generated_tokens": True, "input_tokens": True, "token_logprobs": True, "token_ranks": True}
    request = batch(
        PROMPT,
        method="SAMPLE",
        sampling={"seed": 3},
        stopping=stopping(6),
        response={**options, "top_n_tokens": 2},
    )
    [expected] = router.stub.Generate(request).responses
    for result in (generation, stream.result):
        assert (result.text, result.seed) == (expected.text, 3)
        assert result.generated_token_count == expected.generated_token_count == 6
        assert result.input_token_count == expected.input_token_count
        assert result.stop_reason == expected.stop_reason == StopReason.MAX_TOKENS
        for given, wanted in ((result.tokens, expected.tokens), (result.input_tokens, expected.input_tokens)):
            assert [(each.text, each.rank) for each in given] == [(each.text, each.rank) for each in wanted]
            assert [each.logprob for each in given] == pytest.approx(
                [each.logprob for each in wanted], nan_ok=True
            )
        assert [len(token.top_tokens) for token in result.tokens] == [
            len(token.top_tokens) for token in expected.tokens
        ]
        assert result.report.generated_tokens == 6
        assert result.report.total_ms is not None
        assert result.report.total_ms > 0


def test_ids_in_and_out(open_client: OpenClient, router: Setup) -> None:
    ids = router.tokenizer.encode(PROMPT).ids
    with open_client(target_of(router)) as client:
        [tokens] = client.tokenize([PROMPT], token_ids=True, offsets=True)
        text = client.generate(PROMPT, DETAILS)
        numbers = client.generate(ids, DETAILS, token_ids=True)
        again = client.generate(ids, DETAILS)
    assert tokens.token_ids == tuple(ids)
    assert len(tokens.offsets) == len(ids)
    assert [token.id for token in numbers.input_tokens] == ids
    assert numbers.text == again.text == text.text
    assert again.report.cached_tokens is not None


def test_the_service_accepts_every_argument(open_client: OpenClient, router: Setup) -> None:
    parameters = Parameters(
        max_new_tokens=3,
        temperature=0.9,
        typical_p=0.9,
        min_p=0.01,
        presence_penalty=1,
        frequency_penalty=-1,
        logit_bias={7: -5.0},
        stop_token_ids=[5],
        ignore_eos=True,
        watermark=True,
    )
    arguments = {"priority": 2, "cache_salt": b"\0", "token_ids": True, "trace_context": {"traceparent": "x"}}
    with open_client(target_of(router)) as client:
        assert client.generate([5, 6, 7], parameters, **arguments).generated_token_count == 3
        with pytest.raises(InvalidRequestError, match="temperature"):
            client.generate("a", Parameters(temperature=-1))
        with pytest.raises(InvalidRequestError, match="tgis-unknown"):
            client.model_info(metadata=[("tgis-unknown", "1")])


def test_each_failure_says_what_is_wrong(open_client: OpenClient, router: Setup) -> None:
    target, once = target_of(router), RetryPolicy(max_attempts=1)
    with open_client(target) as client:
        with pytest.raises(TooLargeError, match=r"has 5000\d\d\d bytes, more than the service's limit"):
            client.generate("a " * 2_500_000)
        with pytest.raises(TooLargeError, match="the call's metadata are too large: cache_salt"):
            client.generate("a", cache_salt="x" * 100_000)
        with pytest.raises(DeadlineError, match="Deadline Exceeded"):
            client.generate("a", timeout=0)
    with open_client(f"127.0.0.1:{router.service.http_port}", retry=once) as client:
        with pytest.raises(UnavailableError, match="an HTTP port, and this client needs"):
            client.model_info()
    with open_client("127.0.0.1:1", retry=once) as client:
        with pytest.raises(UnavailableError, match="nothing listens at the target"):
            client.model_info()


def test_a_service_that_dies_in_a_stream_is_named(open_client: OpenClient, tmp_path: Path) -> None:
    router = start_router(tmp_path, 1)
    router.shards[0].step_s = 0.05
    with open_client(target_of(router)) as client:
        stream = client.stream(PROMPT, Parameters(max_new_tokens=150, min_new_tokens=150))
        next(stream)
        router.service.process.kill()
        with pytest.raises(UnavailableError, match="the connection was lost"):
            list(stream)
    stop_shards(router)
    router.service.end()


def test_a_connection_that_is_reset_is_named(open_client: OpenClient, router: Setup) -> None:
    """As by a service that dies while it has data to read."""
    proxy = Proxy(router.service.grpc_port)
    router.shards[0].step_s = 0.05
    try:
        with open_client(f"127.0.0.1:{proxy.port}") as client:
            stream = client.stream(PROMPT, Parameters(max_new_tokens=150, min_new_tokens=150))
            next(stream)
            proxy.reset()
            with pytest.raises(UnavailableError, match=r"the connection was lost.*reset by peer"):
                list(stream)
    finally:
        router.shards[0].step_s = 0.001
        proxy.close()


@pytest.mark.parametrize(
    "target", ["", "http://localhost:8033", "localhost:abc", "localhost:0", "::1", "a:70000"]
)
def test_a_target_that_is_no_address_is_refused_at_once(open_client: OpenClient, target: str) -> None:
    with (
        pytest.raises(SettingsError, match="must be HOST or HOST:PORT of the service's gRPC port, not '"),
        open_client(target),
    ):
        pass


@pytest.mark.parametrize(
    ("target", "address"),
    [
        ("localhost", "localhost:8033"),
        ("[::1]", "[::1]:8033"),
        ("10.0.0.1:1", "10.0.0.1:1"),
        ("dns:///service:8033", "dns:///service:8033"),
        ("unix:/tmp/socket", "unix:/tmp/socket"),
    ],
)
def test_a_target_without_a_port_has_the_usual_one(target: str, address: str) -> None:
    assert read_target(target) == address


def test_health(open_client: OpenClient, router: Setup) -> None:
    with open_client(target_of(router)) as client:
        assert client.is_healthy()
        client.wait_until_healthy(30)
    with open_client("127.0.0.1:1") as client:
        assert not client.is_healthy(1)
        started = time.monotonic()
        with pytest.raises(UnavailableError, match=r"did not become healthy within 0\.5 s"):
            client.wait_until_healthy(0.5)
        assert time.monotonic() - started < 20


def test_an_overloaded_service_is_called_again_when_it_says(router: Setup) -> None:
    """The service asks for one second, and has room again before."""
    full = Parameters(max_new_tokens=150, min_new_tokens=150)
    router.shards[0].step_s = 0.1
    refusals = 'tgi_request_failure_total{err="conc_limit"}'

    def leave_after_a_refusal(count: float) -> None:
        while scrape(router.http)[refusals] == count:
            time.sleep(0.02)
        for stream in streams:
            stream.close()
        router.shards[0].step_s = 0.001

    try:
        with Client(target_of(router)) as client:
            streams = [client.stream(PROMPT, full) for _ in range(4)]
            for stream in streams:
                next(stream)
            with Client(target_of(router), retry=NO_RETRIES) as impatient:
                with pytest.raises(OverloadedError, match="Model is overloaded") as caught:
                    impatient.generate(PROMPT)
            assert (caught.value.retry_after_s, caught.value.num_attempts) == (1, 1)
            leaving = threading.Thread(target=leave_after_a_refusal, args=(scrape(router.http)[refusals],))
            leaving.start()
            started = time.monotonic()
            assert client.generate(PROMPT, full).generated_token_count == 150
            assert time.monotonic() - started >= 1
            leaving.join()
    finally:
        router.shards[0].step_s = 0.001


@pytest.mark.slow
@pytest.mark.parametrize("name", CLIENTS)
def test_a_service_that_is_restarted_loses_no_call(name: str, tmp_path: Path) -> None:
    """A drained service refuses new calls and finishes its streams. Then another one has its port."""
    directories = [tmp_path / "one", tmp_path / "two"]
    for directory in directories:
        directory.mkdir()
    first = start_router(directories[0], 1)
    first.shards[0].step_s = 0.02
    port = first.service.grpc_port
    long, policy = Parameters(max_new_tokens=60, min_new_tokens=60), RetryPolicy(max_attempts=60)
    with CLIENTS[name](f"127.0.0.1:{port}", retry=policy) as client:
        stream = client.stream(PROMPT, long)
        next(stream)
        first.service.process.send_signal(signal.SIGTERM)
        texts: list[str] = []
        thread = threading.Thread(
            target=lambda: texts.append(_generate_elsewhere(f"127.0.0.1:{port}", policy)), daemon=True
        )
        time.sleep(0.2)
        thread.start()
        assert sum(1 for _ in stream) > 5
        assert stream.result.generated_token_count == 60
        assert stop_router(first) == 0
        second = start_router(directories[1], 1, "--grpc-port", str(port))
        thread.join(120)
        assert len(texts) == 1
        assert client.generate(PROMPT).text == texts[0]
        stream = client.stream(PROMPT, long)
        second.shards[0].step_s = 0.02
        next(stream)
        second.service.process.kill()
        with pytest.raises(UnavailableError):
            list(stream)
        assert 0 < stream.result.generated_token_count < 60
        with pytest.raises(AssertionError):
            assert stop_router(second) == 0


def _generate_elsewhere(target: str, policy: RetryPolicy) -> str:
    with Client(target, retry=policy) as client:
        return client.generate(PROMPT, timeout=30).text
