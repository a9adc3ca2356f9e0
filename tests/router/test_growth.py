"""Checks a router's memory after thousands of requests, some of which are cancelled or fail."""

import contextlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import psutil
import pytest

from tests.support.accounts import assert_nothing_left, take_baseline
from tests.support.growth import MAX_GROWTH, MAX_SHARE, NUM_THREADS, growth_per_request, http_mix, mix, slope
from tests.support.router.messages import batch, stopping
from tests.support.router.router_process import Setup, start_router, stop_router
from tgis.pb import generation_pb2 as pb
from tgis.pb.generation_pb2_grpc import GenerationServiceStub

NUM_REQUESTS = 20_000
NUM_LARGE = 60
LARGE_TEXT = "word " * 800_000
TOKENIZED_TEXT = LARGE_TEXT[: 1 << 20]  # shorter, because tokenization takes longer
MAX_LARGE_GROWTH = 100 << 20  # bytes


def growth(
    setup: Setup, num_requests: int, serve: Callable[[int], None] | None = None
) -> tuple[float, float]:
    """Return the growth in bytes over NUM_REQUESTS, and its limit. `serve` sends the requests, by default
    over gRPC."""
    serve = serve or mix(setup.stub)
    setup.shards[0].step_s = 0
    serve(20 * NUM_THREADS)  # starts the processes that the router starts on demand
    baseline, began = take_baseline(setup.http), time.monotonic()
    per_request, size = growth_per_request(setup.service.process.pid, num_requests, serve)
    print(
        f"{num_requests} requests in {time.monotonic() - began:.0f} s: {per_request:.0f} bytes per request, "
        f"of {size / 2**20:.1f} MiB"
    )
    assert_nothing_left(setup.http, baseline)
    return per_request * NUM_REQUESTS, min(MAX_GROWTH, MAX_SHARE * size)


@pytest.mark.slow
def test_memory_does_not_grow_with_requests(tmp_path: Path) -> None:
    setup = start_router(tmp_path, 1)
    try:
        grown, limit = growth(setup, NUM_REQUESTS)
        assert grown < limit
    finally:
        assert stop_router(setup) == 0


@pytest.mark.slow
def test_growth_is_found(tmp_path: Path) -> None:
    """Check that the test above would fail for a router that leaks a kilobyte per request."""
    setup = start_router(tmp_path, 1, module="tests.support.router.growing_router")
    try:
        grown, limit = growth(setup, NUM_REQUESTS // 4)
        assert grown > limit
    finally:
        stop_router(setup)


@pytest.mark.slow
def test_memory_does_not_grow_with_requests_of_openais_api(tmp_path: Path) -> None:
    setup = start_api_router(tmp_path)
    try:
        grown, limit = growth(setup, NUM_REQUESTS // 2, http_mix(setup.service.http_port))
        assert grown < limit
    finally:
        assert stop_router(setup) == 0


@pytest.mark.slow
def test_growth_of_openais_api_is_found(tmp_path: Path) -> None:
    setup = start_api_router(tmp_path, module="tests.support.router.growing_router")
    try:
        grown, limit = growth(setup, NUM_REQUESTS // 4, http_mix(setup.service.http_port))
        assert grown > limit
    finally:
        stop_router(setup)


def start_api_router(directory: Path, module: str | None = None) -> Setup:
    template = directory / "template.jinja"
    template.write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    return start_router(directory, 1, "--http-api", "openai", "--chat-template", str(template), module=module)


def large_mix(setup: Setup) -> None:
    """Send texts of megabytes: refused ones on separate connections, a cancelled one, and a truncated one."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    refused = batch(LARGE_TEXT, stopping=pb.StoppingCriteria(min_new_tokens=21))

    def refuse(_: int) -> None:
        with grpc.insecure_channel(f"127.0.0.1:{setup.service.grpc_port}", options) as channel:
            with contextlib.suppress(grpc.RpcError):
                GenerationServiceStub(channel).Generate(refused)

    with ThreadPoolExecutor(2 * NUM_THREADS) as threads:
        list(threads.map(refuse, range(NUM_LARGE)))
    cancelled = setup.stub.Generate.future(batch(TOKENIZED_TEXT))
    time.sleep(0.1)
    cancelled.cancel()
    few = {"truncate_input_tokens": 9, "stopping": stopping(4)}
    assert setup.stub.Generate(batch(TOKENIZED_TEXT, **few)).responses[0].input_token_count == 9


def memory_of(setup: Setup) -> int:
    """Return the resident bytes of the router and its child processes."""
    router = psutil.Process(setup.service.process.pid)
    return sum(process.memory_info().rss for process in (router, *router.children(recursive=True)))


def grow_with_large_prompts(setup: Setup, wait_s: float) -> int:
    """Return the bytes that the router keeps after `wait_s`, or earlier if they are below the limit."""
    setup.stub.Generate(batch(TOKENIZED_TEXT[: 1 << 16], truncate_input_tokens=9))  # starts the children
    before = memory_of(setup)
    large_mix(setup)
    at_once = kept = memory_of(setup) - before
    begun = time.monotonic()
    while kept > MAX_LARGE_GROWTH and time.monotonic() - begun < wait_s:
        time.sleep(0.1)
        kept = memory_of(setup) - before
    print(f"{at_once >> 20} MiB more, {kept >> 20} MiB after {time.monotonic() - begun:.1f} s")
    return kept


@pytest.mark.slow
def test_memory_of_large_prompts_comes_back(tmp_path: Path) -> None:
    """Check that an idle router releases the memory of earlier requests."""
    setup = start_router(tmp_path, 1)
    try:
        assert grow_with_large_prompts(setup, wait_s=30) < MAX_LARGE_GROWTH
    finally:
        assert stop_router(setup) == 0


def test_a_slope_is_computed_correctly() -> None:
    assert slope([3, 5, 7, 9]) == 2
    assert slope([4] * 9) == 0
