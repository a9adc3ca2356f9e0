"""Checks scrapes while streams run, and more prompts than fit into the cache."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.accounts import assert_nothing_left, scrape, take_baseline
from tests.support.router.expected_answers import expected_text, expected_tokens
from tests.support.router.messages import batch, single, stopping
from tests.support.router.router_process import Setup, start_router, stop_router
from tgis.pb import shard_pb2 as pb

NUM_SCRAPES = 100


@pytest.fixture
def tight(tmp_path: Path) -> Iterator[Setup]:
    """Start a router whose cache holds little more than one long input."""
    setup = start_router(tmp_path, 1, info=pb.InfoResponse(num_blocks=30))
    yield setup
    assert stop_router(setup) == 0


@pytest.mark.slow
def test_more_than_the_cache_holds_is_served_in_turn(tight: Setup) -> None:
    texts = [f"{i} girl bread fox dog time once upon " * 3 for i in range(50)]
    tight.stub.Generate(batch("a"))
    baseline = take_baseline(tight.http)

    def ask(text: str) -> str:
        [answer] = tight.stub.Generate(batch(text, stopping=stopping(60))).responses
        return str(answer.text)

    with ThreadPoolExecutor(len(texts)) as threads:
        answers = list(threads.map(ask, texts))
    assert answers == [expected_text(tight, expected_tokens(tight, text, 60)) for text in texts]
    assert scrape(tight.http)["tgi_preemptions_total"] > 0, "otherwise no resource was short"
    assert tight.shards[0].num_streams == 1, "an assertion of the model ended a stream"
    assert_nothing_left(tight.http, baseline)


@pytest.mark.slow
def test_scrapes_hold_up_no_stream(tight: Setup) -> None:
    setup, gaps = tight, []
    setup.shards[0].step_s = 0.005
    started, over = threading.Event(), threading.Event()

    def read() -> None:
        while not over.is_set():
            last = None
            for _ in setup.stub.GenerateStream(single("a", stopping=stopping(100, min_new_tokens=100))):
                now = time.monotonic()
                if last is not None:
                    gaps.append(now - last)
                last = now
                started.set()

    def timed_scrape(_: int) -> float:
        began = time.monotonic()
        scrape(setup.http)
        return time.monotonic() - began

    with ThreadPoolExecutor(NUM_SCRAPES) as threads, ThreadPoolExecutor(1) as reader:
        reading = reader.submit(read)
        started.wait(10)
        before = len(gaps)
        times = sorted(threads.map(timed_scrape, range(NUM_SCRAPES)))
        over.set()
        reading.result(30)
    longest = max(gaps[before:])
    print(f"median {1000 * times[50]:.0f} ms, slowest {1000 * times[-1]:.0f} ms; gap {1000 * longest:.0f} ms")
    assert longest < 2
    assert times[-1] < 5
