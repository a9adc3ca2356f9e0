"""Check calls with long texts, which a separate process tokenizes, beside calls with short ones."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from tests.support.accounts import scrape
from tests.support.processes import children_of
from tests.support.router.router_process import Setup, start_router, stop_router
from tgis.pb import generation_pb2 as pb
from tgis.pb.generation_pb2_grpc import GenerationServiceStub
from tgis.router.text.tokenizer import LONG_TEXT_BYTES
from tgis.router.text.tokenizer_process import MAX_QUEUED_BYTES

LONG = "fox " * (LONG_TEXT_BYTES // 4 + 1)
MAX_MESSAGE = 4 << 20
REFUSALS = 'tgi_request_failure_total{err="conc_limit"}'


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    setup = start_router(tmp_path_factory.mktemp("router"), 1, "--max-concurrent-requests", "20")
    yield setup
    assert stop_router(setup) == 0, setup.service.output


def test_short_texts_do_not_wait_for_long_ones(setup: Setup) -> None:
    with stopped_child(setup):
        long = setup.stub.Tokenize.future(tokenize_call(LONG))
        cut = setup.stub.Generate.future(generate_call(LONG, truncated=9))
        for _ in range(3):
            assert setup.stub.Tokenize(tokenize_call("fox"), timeout=20).responses[0].token_count
            [response] = setup.stub.Generate(generate_call("fox"), timeout=20).responses
            assert response.generated_token_count == 1
        assert not long.done()
        assert not cut.done()
    expected = setup.tokenizer.encode(LONG)
    assert list(long.result(20).responses[0].tokens) == expected.tokens
    assert cut.result(20).responses[0].input_token_count == 9


def test_a_long_text_outlives_the_death_of_the_process(setup: Setup) -> None:
    with stopped_child(setup) as child:
        with new_calls(setup, 1):
            long = setup.stub.Tokenize.future(tokenize_call(LONG))
        os.kill(child, signal.SIGKILL)
        assert long.result(20).responses[0].token_count == len(setup.tokenizer.encode(LONG))
    assert find_child(setup) not in (None, child)


def test_an_abandoned_text_delays_no_other(setup: Setup) -> None:
    with stopped_child(setup):
        with new_calls(setup, 1):
            left = setup.stub.Tokenize.future(tokenize_call(LONG))
        next = setup.stub.Tokenize.future(tokenize_call(LONG))
        left.cancel()
        assert next.result(20).responses[0].token_count == len(setup.tokenizer.encode(LONG))


@pytest.mark.one_worker("connections to different workers need not take turns")
def test_connections_take_turns(setup: Setup) -> None:
    ended: list[str] = []
    with own_connection(setup) as first, own_connection(setup) as second:
        with stopped_child(setup):
            with new_calls(setup, 4):
                calls = [first.Tokenize.future(tokenize_call(LONG)) for _ in range(4)]
            with new_calls(setup, 1):
                calls.append(second.Tokenize.future(tokenize_call(LONG)))
            for call, name in zip(calls, ["first"] * 4 + ["second"], strict=True):
                call.add_done_callback(lambda _, name=name: ended.append(name))  # type: ignore[misc]
        for call in calls:
            call.result(20)
        wait_until(lambda: len(ended) == 5)
    # One request is already sent; then each connection has its turn. Callbacks of two answers may swap.
    assert ended.index("second") <= 2


def test_waiting_texts_are_bounded(setup: Setup) -> None:
    text = "a" * (MAX_MESSAGE - 1000)
    failures = scrape(setup.http).get(REFUSALS, 0)
    num_queued = MAX_QUEUED_BYTES // len(text)
    with stopped_child(setup):
        with new_calls(setup, 1):
            calls = [setup.stub.Tokenize.future(tokenize_call(text))]
        with new_calls(setup, num_queued):
            calls += [setup.stub.Tokenize.future(tokenize_call(text)) for _ in range(num_queued)]
        with pytest.raises(grpc.RpcError) as refused:
            setup.stub.Tokenize(tokenize_call(text), timeout=20)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert refused.value.details() == "Model is overloaded"
        assert not any(call.done() for call in calls)
        for call in calls:
            call.cancel()
    assert scrape(setup.http)[REFUSALS] == failures + 1


def test_tokenize_has_a_limit_of_its_own(setup: Setup) -> None:
    with stopped_child(setup):
        calls = [setup.stub.Tokenize.future(tokenize_call(LONG)) for _ in range(20)]
        wait_until(lambda: is_refused(setup, tokenize_call("fox")))
        assert setup.stub.Generate(generate_call("fox"), timeout=20).responses
    for call in calls:
        assert call.result(20).responses
    assert answer_to(setup, tokenize_call("fox")).responses
    setup.service.wait_for_line("Tokenize failed with RESOURCE_EXHAUSTED: Model is overloaded")


def test_the_process_dies_with_the_router(tmp_path: Path) -> None:
    setup = start_router(tmp_path, 1)
    with stopped_child(setup) as child:
        assert setup.service.end(signal.SIGKILL) == -signal.SIGKILL
        wait_until(lambda: not Path(f"/proc/{child}").exists())
    stop_router(setup)


def tokenize_call(text: str) -> pb.BatchedTokenizeRequest:
    return pb.BatchedTokenizeRequest(
        requests=[pb.TokenizeRequest(text=text)], return_tokens=len(text) < 10**6
    )


def generate_call(text: str, truncated: int = 0) -> pb.BatchedGenerationRequest:
    params = pb.Parameters(truncate_input_tokens=truncated)
    params.stopping.max_new_tokens = 1
    return pb.BatchedGenerationRequest(requests=[pb.GenerationRequest(text=text)], params=params)


def answer_to(setup: Setup, call: pb.BatchedTokenizeRequest) -> pb.BatchedTokenizeResponse:
    answer: pb.BatchedTokenizeResponse = setup.stub.Tokenize(call, timeout=20)
    return answer


def is_refused(setup: Setup, call: pb.BatchedTokenizeRequest) -> bool:
    code: grpc.StatusCode = setup.stub.Tokenize.future(call).code()  # once it has ended
    return code is grpc.StatusCode.RESOURCE_EXHAUSTED


@contextmanager
def own_connection(setup: Setup) -> Iterator[GenerationServiceStub]:
    options = [("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(f"127.0.0.1:{setup.service.grpc_port}", options) as channel:
        yield GenerationServiceStub(channel)


@contextmanager
def stopped_child(setup: Setup) -> Iterator[int]:
    """Stop the tokenizer process inside the block."""
    answer_to(setup, tokenize_call(LONG))
    child = find_child(setup)
    assert child is not None
    os.kill(child, signal.SIGSTOP)
    try:
        yield child
    finally:
        if Path(f"/proc/{child}").exists():
            os.kill(child, signal.SIGCONT)


def find_child(setup: Setup) -> int | None:
    pid = setup.service.process.pid
    routers = children_of(pid).get("router", [pid])
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            if parent in routers and b"tgis.router.text.tokenizer_child" in (entry / "cmdline").read_bytes():
                return int(entry.name)
        except OSError:
            continue  # it has just ended
    return None


def num_calls(setup: Setup) -> float:
    """Return how many Tokenize calls the router has read; those calls are queued by then, too."""
    return scrape(setup.http)["tgi_tokenize_request_count"]


@contextmanager
def new_calls(setup: Setup, number: int) -> Iterator[None]:
    """Wait at the end of the block until the router has read the `number` calls made inside it."""
    before = num_calls(setup)
    yield
    wait_until(lambda: num_calls(setup) == before + number)


def wait_until(condition: Callable[[], bool], timeout_s: float = 20) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
