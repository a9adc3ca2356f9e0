"""Tests that refusals of large requests wait on each connection, and that nothing else waits."""

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.accounts import assert_nothing_left, scrape, take_baseline
from tests.support.router.router_process import Setup, start_router, stop_router
from tgis.pb import generation_pb2 as pb
from tgis.pb.generation_pb2_grpc import GenerationServiceStub
from tgis.router.api.grpc.refusal_pacing import BYTES_PER_S, MAX_DELAY_S, RefusalPacing

TEXT = "word " * 800_000  # about one second at the maximum rate
MANY = 8  # more than MAX_DELAY_S at the maximum rate
WRONG = pb.Parameters(stopping=pb.StoppingCriteria(min_new_tokens=21))  # refused before tokenization
CALLS = 'tgi_request_count_total{kind="single"}'
PEERS = "abc"
REFUSALS = st.lists(
    st.tuples(st.sampled_from(PEERS), st.integers(0, 50), st.integers(0, 40)), max_size=60
)  # peer, bytes, seconds since the previous refusal


def due_by_history(history: list[tuple[float, int]], bytes_per_s: int, max_delay_s: int) -> float:
    """Return when the next refusal is due. `history` has the connection's refusals as (time, bytes)."""
    due = 0.0
    for now, num_bytes in history:
        due = min(max(due, now) + num_bytes / bytes_per_s, now + max_delay_s)
    return due


@given(REFUSALS)
def test_delays_are_those_of_a_model_that_forgets_nothing(refusals: list[tuple[str, int, int]]) -> None:
    pacing, now = RefusalPacing(bytes_per_s=2, max_delay_s=20), 0
    history: dict[str, list[tuple[float, int]]] = {peer: [] for peer in PEERS}
    for peer, num_bytes, pause in refusals:
        now += pause
        expected = max(due_by_history(history[peer], 2, 20) - now, 0)
        assert pacing.delay(peer, num_bytes, now) == expected
        history[peer].append((now, num_bytes))
        assert len(pacing) <= sum(due_by_history(history[each], 2, 20) > now - 20 for each in PEERS)


def test_quiet_connections_are_forgotten() -> None:
    pacing = RefusalPacing()
    for i in range(100_000):
        assert pacing.delay(f"ipv4:10.0.0.1:{i}", BYTES_PER_S, i / 100) == 0
        assert len(pacing) <= 100 * MAX_DELAY_S + 1


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    # A client that waits a second for a refusal must not count as a slow reader.
    setup = start_router(tmp_path_factory.mktemp("router"), 1, "--slow-reader-timeout", "0.5")
    setup.stub.Generate(small())
    yield setup
    assert stop_router(setup) == 0, setup.service.output


@contextlib.contextmanager
def own_connection(setup: Setup) -> Iterator[GenerationServiceStub]:
    options = [("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(f"127.0.0.1:{setup.service.grpc_port}", options) as channel:
        yield GenerationServiceStub(channel)


def refused(text: str = TEXT) -> pb.BatchedGenerationRequest:
    return pb.BatchedGenerationRequest(requests=[pb.GenerationRequest(text=text)], params=WRONG)


def small() -> pb.BatchedGenerationRequest:
    return pb.BatchedGenerationRequest(requests=[pb.GenerationRequest(text="girl")])


def code(call: Callable[[], object]) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    status: grpc.StatusCode = caught.value.code()
    return status


def begin(setup: Setup, stub: GenerationServiceStub, count: int) -> list[grpc.Future]:
    """Begin large calls, and return them once the router has counted them all."""
    before = scrape(setup.http).get(CALLS, 0)
    calls = [stub.Generate.future(refused()) for _ in range(count)]
    deadline = time.monotonic() + 20
    while scrape(setup.http).get(CALLS, 0) < before + count:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return calls


def test_large_refusals_in_a_row_come_at_a_rate(router: Setup) -> None:
    begun = time.monotonic()
    with own_connection(router) as stub:
        for _ in range(3):
            assert code(lambda: stub.Generate(refused())) is grpc.StatusCode.INVALID_ARGUMENT
    assert time.monotonic() - begun > 2 * len(TEXT) / BYTES_PER_S - 0.1


def test_nothing_else_waits(router: Setup) -> None:
    with own_connection(router) as stub, own_connection(router) as other:
        calls = begin(router, stub, MANY)
        assert scrape(router.http)["tgi_permits_used"] == 0
        for _ in range(20):
            assert stub.Generate(small()).responses
            assert code(lambda: stub.Generate(refused("girl"))) is grpc.StatusCode.INVALID_ARGUMENT
        assert code(lambda: other.Generate(refused())) is grpc.StatusCode.INVALID_ARGUMENT
        assert not all(call.done() for call in calls)


def test_a_cancelled_call_leaves_at_once(router: Setup) -> None:
    baseline = take_baseline(router.http)
    with own_connection(router) as stub:
        begun = time.monotonic()
        calls = begin(router, stub, MANY)
        for call in calls:
            call.cancel()
        assert_nothing_left(router.http, {"tgi_tasks": baseline["tgi_tasks"]})
        assert time.monotonic() - begun < MAX_DELAY_S


@pytest.mark.slow
def test_the_end_waits_for_no_refusal(tmp_path: Path) -> None:
    setup = start_router(tmp_path, 1)
    try:
        with own_connection(setup) as stub:
            calls = begin(setup, stub, MANY)
            begun = time.monotonic()
            assert setup.service.end() == 0
            assert time.monotonic() - begun < MAX_DELAY_S - 1
            assert {call.code() for call in calls} == {grpc.StatusCode.INVALID_ARGUMENT}
    finally:
        stop_router(setup)
