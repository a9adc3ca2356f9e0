"""A service that is launched with another server's command line, with transformers' answers for its model."""

import contextlib
import json
import os
import re
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from integration_tests.clients.expectations import Served
from integration_tests.clients.served import expected_chats, expected_completions, write_served_model
from integration_tests.support.door_requests import Fields
from integration_tests.support.inputs_requests import InputsDoors
from integration_tests.support.tuned_files import LINEAR, write_adapter
from tests.support.processes import Service, children_of

SLOWLY = {"FAILPOINTS": "shard.before_forward=sleep:0.02"}
LENGTH, NUM_STREAMS = 60, 6
STATUS_TIMEOUT_S = 30.0
LOGPROB = re.compile(rb'"log_?prob":(-[0-9.e-]+)')
Body = Mapping[str, Any]
MakeBody = Callable[[str, Fields], Body]


@dataclass(frozen=True)
class Launched:
    service: Service
    served: Served

    @property
    def doors(self) -> InputsDoors:
        return InputsDoors(self.served)

    def ask(self, path: str, body: Body | None = None) -> tuple[int, str]:
        """Return the status and body of a POST, or of a GET if there is no body to send."""
        data = None if body is None else json.dumps(body).encode()
        headers = {**self.served.headers, "content-type": "application/json"}
        request = urllib.request.Request(self.service.http + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()


@contextlib.contextmanager
def launched(
    directory: Path, flags: list[str], env: dict[str, str], api_key: str = "", max_length: int = 512
) -> Iterator[Launched]:
    """Launch with flags and variables in which FOLDER stands for the directory, where `model` and the adapter
    `tuned` are."""
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
    """Hold so many streams open while the block runs."""
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            stack.enter_context(launched.doors.post(path, body)).readline()
        yield


def check_survival(launched: Launched, path: str, make_body: MakeBody) -> None:
    """All streams of a path give the same as when no shard is killed under them, but for the rounding of
    sums over two ranks."""
    bodies = [make_body(asked.prompt, _fields(i)) for i, asked in enumerate(launched.served.completions)]
    bodies = bodies[:NUM_STREAMS]
    undisturbed = [_read(launched, path, body) for body in bodies]
    with contextlib.ExitStack() as stack:
        streams = [stack.enter_context(launched.doors.post(path, body)) for body in bodies]
        first = [stream.readline() for stream in streams]
        os.kill(children_of(launched.service.process.pid)["serve"][0], signal.SIGKILL)
        disturbed = [line + stream.read() for line, stream in zip(first, streams, strict=True)]
    for one, other in zip(disturbed, undisturbed, strict=True):
        assert LOGPROB.sub(b"", one) == LOGPROB.sub(b"", other)
        numbers = [[float(number) for number in LOGPROB.findall(text)] for text in (one, other)]
        assert numbers[0] == pytest.approx(numbers[1], abs=1e-4)
    assert "requests resume" in launched.service.output


def _fields(i: int) -> Fields:
    return {"temperature": i % 2, "seed": i, "max_tokens": LENGTH}


def _read(launched: Launched, path: str, body: Body) -> bytes:
    with launched.doors.post(path, body) as response:
        return response.read()


def wait_for_status(launched: Launched, path: str, status: int) -> str:
    """Return the body of the first answer to a GET that has the status."""
    deadline = time.monotonic() + STATUS_TIMEOUT_S
    while (found := launched.ask(path))[0] != status:
        assert time.monotonic() < deadline, (found, launched.service.output)
        time.sleep(0.02)
    return found[1]
