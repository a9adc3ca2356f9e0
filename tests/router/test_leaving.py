"""Checks clients that disconnect in several ways, and too many clients.

The router releases their resources immediately, and waiting requests start."""

import math
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from tests.support.accounts import assert_nothing_left, scrape, take_baseline
from tests.support.router.messages import batch, single, stopping
from tests.support.router.model_of_shard import integers
from tests.support.router.proxy import Proxy
from tests.support.router.router_process import Setup, start_router, stop_router
from tgis.pb import shard_pb2
from tgis.pb.generation_pb2_grpc import GenerationServiceStub

LONG_STEPS = 190  # at least, as long as no client leaves
LONG = {"stopping": stopping(LONG_STEPS, min_new_tokens=LONG_STEPS)}
LIMIT = 8
KEEPALIVE_S = 1.0
CLIENT = """
import sys
import grpc
from tgis.pb import generation_pb2 as pb
from tgis.pb.generation_pb2_grpc import GenerationServiceStub

request = pb.SingleGenerationRequest.FromString(bytes.fromhex(sys.argv[2]))
stream = GenerationServiceStub(grpc.insecure_channel(sys.argv[1])).GenerateStream(request)
for number, _ in enumerate(stream):
    if number == 3:
        print("running", flush=True)
"""


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Setup, dict[str, float]]]:
    """Start a router that runs two requests and queues a few. Return it and its baseline when idle."""
    flags = ["--max-batch-size", "2", "--max-concurrent-requests", str(LIMIT)]
    flags += ["--keepalive-time", str(KEEPALIVE_S)]
    setup = start_router(tmp_path_factory.mktemp("small"), 1, *flags)
    setup.stub.Generate(batch("a"))
    yield setup, take_baseline(setup.http)
    assert stop_router(setup) == 0


@pytest.fixture(autouse=True)
def _usual_speed(small: tuple[Setup, dict[str, float]]) -> Iterator[None]:
    yield
    small[0].shards[0].step_s = 0.001


class Opened:
    """Recorder of the prompts that the shard has started to compute, in order."""

    def __init__(self, setup: Setup) -> None:
        self.prompts: list[list[int]] = []
        self._model = setup.shards[0].model
        self._model.refuses = self._note

    def _note(self, message: shard_pb2.OpenRow) -> bool:
        self.prompts.append(integers(message.token_ids))
        return False

    def close(self) -> None:
        self._model.refuses = lambda message: False


@pytest.mark.parametrize("kind", ["stream", "unary"])
def test_a_cancelled_call_is_computed_no_further(small: tuple[Setup, dict[str, float]], kind: str) -> None:
    setup, baseline = small
    shard = setup.shards[0]
    shard.step_s = 0.1
    if kind == "stream":
        call = setup.stub.GenerateStream(single(**LONG))
        for _ in range(4):
            next(call)
    else:
        num_steps = shard.num_steps
        call = setup.stub.Generate.future(batch("a", **LONG))
        deadline = time.monotonic() + 30
        while shard.num_steps < num_steps + 3:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    num_steps = shard.num_steps
    call.cancel()
    assert_nothing_left(setup.http, baseline)
    # One step may be running, two are in flight, and one may be sent before the router notices the end.
    assert shard.num_steps - num_steps <= 4
    num_steps = shard.num_steps
    time.sleep(0.3)
    assert shard.num_steps == num_steps


def test_a_killed_client_leaves_nothing(small: tuple[Setup, dict[str, float]]) -> None:
    setup, baseline = small
    setup.shards[0].step_s = 0.05
    arguments = [f"127.0.0.1:{setup.service.grpc_port}", single(**LONG).SerializeToString().hex()]
    client = subprocess.Popen([sys.executable, "-c", CLIENT, *arguments], stdout=subprocess.PIPE, text=True)
    assert client.stdout is not None
    with client.stdout:
        assert client.stdout.readline() == "running\n"
        num_steps = setup.shards[0].num_steps
        assert scrape(setup.http)["tgi_requests_running"] == 1
        client.send_signal(signal.SIGKILL)
        client.wait()
    assert_nothing_left(setup.http, baseline)
    assert setup.shards[0].num_steps - num_steps < LONG_STEPS / 2


def test_a_client_whose_network_vanishes_leaves_nothing(small: tuple[Setup, dict[str, float]]) -> None:
    """Check that the resources are free before the call's own end, which would also release them."""
    setup, baseline = small
    setup.shards[0].step_s = 0.1
    proxy = Proxy(setup.service.grpc_port)
    channel = grpc.insecure_channel(f"127.0.0.1:{proxy.port}")
    try:
        stream = GenerationServiceStub(channel).GenerateStream(single(**LONG))
        next(stream), next(stream)
        proxy.passes.clear()
        num_steps = setup.shards[0].num_steps
        time.sleep(KEEPALIVE_S / 3)
        assert scrape(setup.http)["tgi_requests_live"] == 1
        assert_nothing_left(setup.http, baseline)
        assert setup.shards[0].num_steps - num_steps < LONG_STEPS / 2
    finally:
        proxy.close()
        channel.close()


def test_requests_that_time_out_in_the_queue_are_never_computed(
    small: tuple[Setup, dict[str, float]],
) -> None:
    setup, baseline = small
    setup.shards[0].step_s = 0.1
    busy = [setup.stub.GenerateStream(single(f"busy {i}", **LONG)) for i in range(2)]
    for call in busy:
        next(call), next(call)
    opened = Opened(setup)
    try:
        time_out(setup, "late")
        for call in busy:
            call.cancel()
        setup.shards[0].step_s = 0.001
        assert setup.stub.Generate(batch("next")).responses
    finally:
        opened.close()
    assert opened.prompts == [setup.tokenizer.encode("next").ids]
    assert_nothing_left(setup.http, baseline)


def time_out(setup: Setup, text: str) -> None:
    """Let a call time out after the router has received it, and wait until the router knows it."""
    before, changes, timeout_s = outcomes(setup), Counter[str](), 0.2
    while not changes["calls"]:
        with pytest.raises(grpc.RpcError) as caught:
            setup.stub.Generate(batch(text), timeout=timeout_s)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        changes, timeout_s = outcomes(setup) - before, 2 * timeout_s
    deadline = time.monotonic() + 30
    while changes["cancelled"] < changes["calls"]:
        assert time.monotonic() < deadline, changes
        time.sleep(0.01)
        changes = outcomes(setup) - before


def test_too_many_are_refused_at_once_and_use_no_slot(small: tuple[Setup, dict[str, float]]) -> None:
    setup, baseline = small
    setup.shards[0].step_s = 0.1
    refusals = 'tgi_request_failure_total{err="conc_limit"}'
    before = scrape(setup.http).get(refusals, 0.0)
    calls = [setup.stub.GenerateStream(single(f"{i}", **LONG)) for i in range(LIMIT)]
    for call in calls:
        next(call)
    slowest = 0.0
    for _ in range(3 * LIMIT):
        began = time.monotonic()
        with pytest.raises(grpc.RpcError, match="Model is overloaded"):
            setup.stub.Generate(batch("a"))
        slowest = max(slowest, time.monotonic() - began)
    print(f"slowest refusal: {1000 * slowest:.1f} ms")
    assert slowest < 10
    for call in calls:
        call.cancel()
    assert_nothing_left(setup.http, baseline)
    assert scrape(setup.http)[refusals] - before == 3 * LIMIT
    setup.shards[0].step_s = 0.001
    assert len(setup.stub.Generate(batch(*["a"] * LIMIT, stopping=stopping(1))).responses) == LIMIT


def test_no_sequence_starves_behind_new_ones(small: tuple[Setup, dict[str, float]]) -> None:
    """Check that at most LIMIT requests in the queue start before a long prompt with a long answer."""
    setup, baseline = small
    setup.shards[0].step_s = 0.005
    opened, max_opened = Opened(setup), math.inf
    long = "girl fox " * 20

    def hurry(worker: int) -> None:
        number = 0
        while len(opened.prompts) < max_opened:
            setup.stub.Generate(batch(f"{worker} {number}", stopping=stopping(3)))
            number += 1

    with ThreadPoolExecutor(5) as threads:
        try:
            workers = [threads.submit(hurry, worker) for worker in range(5)]
            wait_for_opened(opened, LIMIT)
            num_before = len(opened.prompts)
            stream = setup.stub.GenerateStream(single(long, stopping=stopping(60, min_new_tokens=60)))
            next(stream)  # the stream is in the queue
            num_ahead = len(opened.prompts) - num_before
            max_opened = len(opened.prompts) + 5 * LIMIT
            assert list(stream)[-1].generated_token_count == 60
            for worker in workers:
                worker.result(60)
        finally:
            max_opened = 0
            opened.close()
    place = opened.prompts.index(setup.tokenizer.encode(long).ids) - num_before
    print(f"{place} others began first, {num_ahead} of them before it was in the queue")
    assert place <= num_ahead + LIMIT
    assert_nothing_left(setup.http, baseline)


def wait_for_opened(opened: Opened, count: int) -> None:
    deadline = time.monotonic() + 30
    while len(opened.prompts) < count:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize(
    "num_calls", [100, pytest.param(1000, marks=[pytest.mark.slow])], ids=["some", "many"]
)
def test_a_cancel_that_races_the_end_is_one_or_the_other(
    small: tuple[Setup, dict[str, float]], num_calls: int
) -> None:
    setup, baseline = small
    began = time.monotonic()
    for _ in range(10):
        setup.stub.Generate(batch("a", stopping=stopping(2, min_new_tokens=2)))
    usual_s = (time.monotonic() - began) / 10
    before, r = outcomes(setup), random.Random(0)
    waits = [r.uniform(0, 5 * usual_s) for _ in range(num_calls)]

    def race(wait_s: float) -> grpc.StatusCode:
        call = setup.stub.Generate.future(batch("a", stopping=stopping(2, min_new_tokens=2)))
        time.sleep(wait_s)
        call.cancel()
        code: grpc.StatusCode = call.code()
        return code

    with ThreadPoolExecutor(4) as threads:
        ends = Counter(threads.map(race, waits))
    assert set(ends) == {grpc.StatusCode.OK, grpc.StatusCode.CANCELLED}, ends
    assert_nothing_left(setup.http, baseline)
    changes = outcomes(setup) - before
    assert changes["calls"] == changes["successes"] + changes["cancelled"] > num_calls / 2, changes
    assert changes["successes"] >= ends[grpc.StatusCode.OK] > 0
    assert changes["cancelled"] > 0


def outcomes(setup: Setup) -> Counter[str]:
    names = {
        "calls": 'tgi_request_count_total{kind="single"}',
        "successes": 'tgi_request_success_total{kind="single",stop_reason="MAX_TOKENS"}',
        "cancelled": 'tgi_request_failure_total{err="cancelled"}',
    }
    samples = scrape(setup.http)
    return Counter({name: int(samples.get(series, 0)) for name, series in names.items()})
