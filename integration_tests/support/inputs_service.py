"""Launches a service with another server's command line, with transformers' responses for its model."""

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from integration_tests.clients.expectations import Served
from integration_tests.clients.served import expected_chats, expected_completions, write_served_model
from integration_tests.support.api_requests import Fields
from integration_tests.support.inputs_requests import InputsApis
from integration_tests.support.tuned_files import LINEAR, write_adapter
from tests.support.accounts import scrape
from tests.support.http_exchange import HttpReply, exchange
from tests.support.processes import Service, children_of

SLOWLY = {"FAILPOINTS": "shard.before_forward=sleep:0.02"}
LENGTH, NUM_STREAMS = 60, 6
STATUS_TIMEOUT_S = 30.0
Body = Mapping[str, Any]
MakeBody = Callable[[str, Fields], Body]


@dataclass(frozen=True)
class Launched:
    service: Service
    served: Served

    @property
    def apis(self) -> InputsApis:
        return InputsApis(self.served)

    def ask(self, path: str, body: Body | None = None) -> HttpReply:
        """Send a POST, or a GET if there is no body."""
        return exchange(self.service.http + path, body, self.served.headers)


@contextlib.contextmanager
def launched(
    directory: Path, flags: list[str], env: dict[str, str], api_key: str = "", max_length: int = 512
) -> Iterator[Launched]:
    """Launch with flags and variables in which FOLDER stands for the directory of `model` and of the adapter
    `tuned`."""
    model = directory / "model"
    oracle = write_served_model(model)
    write_adapter(directory / "tuned", model, 9, LINEAR)
    answers = expected_completions(oracle), expected_chats(oracle, model)
    command = ["launcher", *flags, "--lora-adapters", "tuned=FOLDER/tuned", "--grpc-port", "0"]
    command = [word.replace("FOLDER", str(directory)) for word in command]
    env = {name: value.replace("FOLDER", str(directory)) for name, value in env.items()}
    log = {"TERMINATION_LOG": str(directory / "log")}
    service = Service(command, {**SLOWLY, **log, **env}).wait_until_serving()
    try:
        yield Launched(service, Served(f"{service.http}/v1", api_key, "", str(model), max_length, *answers))
    finally:
        code = service.end()
    assert code == 0, service.output


@contextlib.contextmanager
def busy(launched: Launched, path: str, body: Body, count: int) -> Iterator[None]:
    """Keep this many requests in the service during the block, running or waiting."""
    with ThreadPoolExecutor(count) as threads:
        streams = [threads.submit(_read, launched, path, body) for _ in range(count)]
        deadline = time.monotonic() + STATUS_TIMEOUT_S
        while scrape(launched.service.http)["tgi_permits_used"] < count:
            assert time.monotonic() < deadline, launched.service.output
        yield
        assert not any(stream.done() for stream in streams[-1:]), "the last one has to run"


def check_survival(launched: Launched, path: str, make_body: MakeBody) -> None:
    """Check that all streams of a path are unchanged when a shard is killed during them, up to the rounding
    of sums over two ranks."""
    bodies = [make_body(asked.prompt, _fields(i)) for i, asked in enumerate(launched.served.completions)]
    bodies = bodies[:NUM_STREAMS]
    undisturbed = [_read(launched, path, body) for body in bodies]
    with contextlib.ExitStack() as stack:
        streams = [stack.enter_context(launched.apis.post(path, body)) for body in bodies]
        first = [stream.readline() for stream in streams]
        os.kill(children_of(launched.service.process.pid)["serve"][0], signal.SIGKILL)
        disturbed = [line + stream.read() for line, stream in zip(first, streams, strict=True)]
    for one, other in zip(map(_events, disturbed), map(_events, undisturbed), strict=True):
        assert [event[1] for event in one] == [event[1] for event in other]
        assert [event[0] for event in one] == pytest.approx([event[0] for event in other], abs=1e-4)
    assert "requests resume" in launched.service.output


def _events(body: bytes) -> list[tuple[float, Any]]:
    """Return each token's log-probability, and the event without it. Comments are skipped."""
    lines = [line for line in body.splitlines() if line and not line.startswith(b":")]
    events = [json.loads(line.removeprefix(b"data: ")) for line in lines]
    names = [name for name in ("logprob", "log_prob") if name in events[0]["token"]]
    return [(event["token"].pop(names[0]), event) for event in events]


def _fields(i: int) -> Fields:
    return {"temperature": i % 2, "seed": i, "max_tokens": LENGTH}


def _read(launched: Launched, path: str, body: Body) -> bytes:
    with launched.apis.post(path, body) as response:
        return response.read()


def wait_for_status(launched: Launched, path: str, status: int) -> str:
    """Return the body of the first response to a GET that has the status."""
    deadline = time.monotonic() + STATUS_TIMEOUT_S
    while (response := launched.ask(path)).status != status:
        assert time.monotonic() < deadline, (response, launched.service.output)
        time.sleep(0.02)
    return response.text
