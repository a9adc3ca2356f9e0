"""Runs a client beside any other load: each request gets a response equal to the first one."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from integration_tests.support.service import Client
from tests.support.accounts import assert_nothing_left, take_baseline
from tests.support.http_exchange import exchange

NUM_TOKENS = 8
REQUEST = {"prompt": "once upon a time", "max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0}
PAUSE_S = 0.02
API = ["--http-api", "openai"]
"""Flags that a service needs for it."""


def ask(http: str) -> str:
    """Return the text of one request, on a new connection."""
    reply = exchange(f"{http}/v1/completions", REQUEST)
    assert reply.status == 200, reply.text
    assert reply.json["usage"]["completion_tokens"] == NUM_TOKENS
    return str(reply.json["choices"][0]["text"])


def wait_for_answers(seconds: list[float], number: int = 2) -> None:
    """Wait until the steady client has had `number` responses to requests that begin from now on."""
    num_wanted, deadline = len(seconds) + 1 + number, time.monotonic() + 60  # one may be running
    while len(seconds) < num_wanted:
        assert time.monotonic() < deadline, f"{len(seconds)} answers of {num_wanted}"
        time.sleep(PAUSE_S)


@contextmanager
def steady_client(http: str) -> Iterator[list[float]]:
    """Send requests repeatedly during the block; yield the list of their durations in seconds."""
    first, seconds, stop = ask(http), list[float](), threading.Event()

    def ask_until_stopped() -> None:
        while not stop.wait(PAUSE_S):
            began = time.monotonic()
            assert ask(http) == first
            seconds.append(time.monotonic() - began)

    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(ask_until_stopped)
        try:
            yield seconds
        finally:
            stop.set()
        asked.result()
    assert seconds
    print(f"{len(seconds)} steady requests, the slowest took {max(seconds):.2f} s")


@contextmanager
def beside_a_steady_client(client: Client) -> Iterator[list[float]]:
    """Yield the durations of its requests; afterwards no resource of the block's clients may be held."""
    http = client.service.http
    ask(http)
    baseline, num_lines = take_baseline(http), len(client.service.lines)
    with steady_client(http) as seconds:
        yield seconds
    assert_nothing_left(http, baseline, timeout_s=30)
    assert not [line for line in client.service.lines[num_lines:] if "Traceback" in line]
