"""Check that every resource is released, however a call ends.

The router's own counts are checked while it runs and at its end, and its shard's state as well."""

import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from tests.support.accounts import assert_nothing_left, differences, scrape, take_baseline
from tests.support.router.messages import batch, single, stopping
from tests.support.router.router_process import Setup, start_router, stop_router, stop_shards

LENGTH = 150
CREATED = 'tgi_resources_created_total{kind="request"}'
KINDS = {"unary": ["one"], "stream": ["one"], "batch": ["one", "two", "three"]}


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Setup, dict[str, float]]]:
    """A warm router and its counts when idle."""
    setup = start_router(tmp_path_factory.mktemp("watched"), 1)
    for kind in KINDS:
        call(setup, kind)
    yield setup, take_baseline(setup.http)
    assert stop_router(setup) == 0


def call(
    setup: Setup, kind: str, length: int = 5, timeout: float | None = None, **more: object
) -> grpc.StatusCode:
    """Make a call of that kind and return its status."""
    params = {"stopping": stopping(length, min_new_tokens=length)} | more
    try:
        if kind == "stream":
            list(setup.stub.GenerateStream(single("one", **params), timeout=timeout))
        else:
            setup.stub.Generate(batch(*KINDS[kind], **params), timeout=timeout)
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def cancel(setup: Setup, kind: str) -> grpc.StatusCode:
    """Cancel a call that is running."""
    params = {"stopping": stopping(LENGTH, min_new_tokens=LENGTH)}
    if kind == "stream":
        begun = setup.stub.GenerateStream(single("one", **params))
        next(begun), next(begun)
    else:
        begun = setup.stub.Generate.future(batch(*KINDS[kind], **params))
    wait_until_running(setup, len(KINDS[kind]))
    begun.cancel()
    code: grpc.StatusCode = begun.code()
    return code


def wait_until_running(setup: Setup, num_inputs: int) -> None:
    deadline = time.monotonic() + 60
    while scrape(setup.http)["tgi_requests_running"] < num_inputs:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def fail(setup: Setup, kind: str) -> grpc.StatusCode:
    """Make a call with a row that the shard refuses."""
    model = setup.shards[0].model
    model.refuses = lambda message: True
    try:
        return call(setup, kind)
    finally:
        model.refuses = lambda message: False


ENDS: dict[str, tuple[Callable[[Setup, str], grpc.StatusCode], grpc.StatusCode]] = {
    "ok": (call, grpc.StatusCode.OK),
    "cancel": (cancel, grpc.StatusCode.CANCELLED),
    "deadline": (
        lambda setup, kind: call(setup, kind, LENGTH, timeout=1.5),
        grpc.StatusCode.DEADLINE_EXCEEDED,
    ),
    "error": (fail, grpc.StatusCode.INTERNAL),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("end", ENDS)
def test_nothing_is_left(watched: tuple[Setup, dict[str, float]], end: str, kind: str) -> None:
    setup, baseline = watched
    make, code = ENDS[end]
    before = scrape(setup.http)[CREATED]
    setup.shards[0].step_s = 0.001 if end == "ok" else 0.02
    try:
        assert make(setup, kind) is code
    finally:
        setup.shards[0].step_s = 0.001
    assert_nothing_left(setup.http, baseline)
    assert scrape(setup.http)[CREATED] - before == len(KINDS[kind])
    assert call(setup, "unary") is grpc.StatusCode.OK
    assert len(setup.shards[0].model.rows) == 1, "the row of the last call, which the next step will close"


def test_refused_calls_hold_no_resources(watched: tuple[Setup, dict[str, float]]) -> None:
    setup, baseline = watched
    before = scrape(setup.http)[CREATED]
    for kind in KINDS:
        assert call(setup, kind, length=500) is grpc.StatusCode.INVALID_ARGUMENT
    with pytest.raises(grpc.RpcError, match="Model is overloaded"):
        setup.stub.Generate(batch(*["a"] * 513))
    assert_nothing_left(setup.http, baseline)
    assert scrape(setup.http)[CREATED] == before


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_left_at_the_end(tmp_path: Path, kind: str) -> None:
    """Check calls that the shutdown aborts."""
    setup = start_router(tmp_path, 1, "--shutdown-timeout", "0.2")
    setup.shards[0].step_s = 0.02
    with ThreadPoolExecutor(1) as threads:
        ended: Future[grpc.StatusCode] = threads.submit(call, setup, kind, LENGTH)
        wait_until_running(setup, len(KINDS[kind]))
        assert stop_router(setup) == 0, setup.service.output
        assert ended.result(10) is grpc.StatusCode.UNAVAILABLE
    assert "leaked" not in setup.service.output, "as every end of a router is checked"


@pytest.mark.slow
def test_leaks_are_found(tmp_path: Path) -> None:
    """Check that the tests above fail for a router that leaks some of every resource."""
    setup = start_router(tmp_path, 1, module="tests.support.router.leaky_router")
    try:
        baseline = take_baseline(setup.http)
        assert call(setup, "batch") is grpc.StatusCode.OK
        with pytest.raises(AssertionError):
            assert_nothing_left(setup.http, baseline, timeout_s=0.5)
        result = differences(setup.http, baseline)
    finally:
        with pytest.raises(AssertionError, match="leaked"):
            setup.service.end()
        stop_shards(setup)
    assert result["permit"] < 0, "a resource released twice"
    assert all(result[kind] > 0 for kind in ("request", "block", "row", "tgi_tasks", "tgi_open_descriptors"))
    leaked = set(re.findall(r"WARNING.*leaked (\w+): \d+ created, \d+ released", setup.service.output))
    assert leaked == {"request", "block", "row", "permit"}
