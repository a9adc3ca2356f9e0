"""Checks that logs, metrics and traces contain no secrets. The service logs at debug level, sends traces and
fails in many ways, while clients send marked prompts, headers and keys."""

import json
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from tests.support.router.messages import batch, stopping
from tests.support.router.router_process import Setup, start_router, stop_router
from tests.support.tls_files import Files
from tests.support.trace_collector import Collector
from tgis.pb import generation_pb2 as pb
from tgis.pb.generation_pb2_grpc import GenerationServiceStub

MARK = "mArKeD"
TOKEN = f"token-{MARK}"
HEADERS = (("x-api-key", MARK), ("cookie", MARK), ("x-mark-bin", MARK.encode()))


@pytest.fixture
def secrets(files: Files) -> list[str]:
    """Return the lines of the server's private key."""
    return [line for line in (files.directory / "key.pem").read_text().splitlines() if "-----" not in line]


@pytest.fixture
def setup(files: Files, tmp_path: Path, collector: tuple[Collector, str]) -> Iterator[Setup]:
    (tmp_path / "tokens").write_text(f"{TOKEN}\n")
    flags = ["--log-level", "debug", "--auth-tokens-path", str(tmp_path / "tokens")]
    flags += [*files.flags("cert", "key", "ca"), "--otlp-endpoint", f"http://{collector[1]}"]
    setup = start_router(tmp_path, 1, *flags, "--failpoints", "router.before_step=raise@60")
    setup.channel.close()
    setup.channel = grpc.secure_channel(f"localhost:{setup.service.grpc_port}", files.client())
    setup.stub = GenerationServiceStub(setup.channel)
    yield setup
    stop_router(setup)


def bad_calls() -> Iterator[pb.BatchedGenerationRequest]:
    """Yield requests that the service refuses because of their marked values."""
    for guide in (
        {"regex": f"({MARK}"},
        {"grammar": f"{MARK} ::= "},
        {"json_schema": f'{{"type": "{MARK}"}}'},
    ):
        yield batch("a", decoding=pb.DecodingParameters(**guide))
    yield batch("a", decoding=pb.DecodingParameters(json_schema=MARK))
    choices = pb.DecodingParameters.StringChoices(choices=[MARK])
    yield batch("a", decoding=pb.DecodingParameters(choice=choices))
    yield batch("a", stopping=stopping(5, stop_sequences=[MARK * 100] * 7))
    yield batch(MARK * 300)
    yield batch(MARK, stopping=stopping(1, min_new_tokens=2))


def ask(setup: Setup, request: pb.BatchedGenerationRequest, token: str = TOKEN) -> tuple[str, str]:
    """Return the output and the details of an error, one of them empty."""
    metadata = (("authorization", f"Bearer {token}"), *HEADERS)
    try:
        return setup.stub.Generate(request, metadata=metadata, timeout=20).responses[0].text, ""
    except grpc.RpcError as error:
        return "", error.details()


def send_garbage(setup: Setup) -> str:
    call = setup.channel.unary_unary("/fmaas.GenerationService/Generate", request_serializer=bytes)
    with pytest.raises(grpc.RpcError) as caught:
        call(b"\xff" + MARK.encode(), metadata=(("authorization", f"Bearer {TOKEN}"), *HEADERS), timeout=20)
    return caught.value.details()


def scrape(setup: Setup) -> str:
    with urllib.request.urlopen(f"{setup.http}/metrics", timeout=10) as response:
        return response.read().decode()


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_nothing_is_shown_to_others(
    setup: Setup, collector: tuple[Collector, str], files: Files, secrets: list[str]
) -> None:
    good = batch(f"girl {MARK} bread", stopping=stopping(30, min_new_tokens=30))
    output, _ = ask(setup, good)
    assert len(output) > 20
    errors = [ask(setup, request)[1] for request in bad_calls()]
    errors += [ask(setup, good, f"{TOKEN}x")[1], send_garbage(setup)]
    assert all(errors)
    quoting = [error for error in errors if MARK in error]
    assert quoting == [f"json_schema is not valid: Invalid type: {MARK}"], "its client knows it"
    metrics = scrape(setup)
    wait_until(lambda: len(collector[0].spans) >= 5)
    for _ in range(3):
        ask(setup, good)
    setup.service.wait_for_line("InjectedError")
    stop_router(setup)
    printed = setup.service.output
    assert all(
        word in printed for word in ("DEBUG", "Traceback", "InjectedError", "json_schema is not valid")
    )
    spans = repr([request.SerializeToString() for request in collector[0].requests])
    for secret in (MARK, output[:20], *secrets):
        for shown in (printed, metrics, spans):
            assert secret not in shown
            assert json.dumps(secret)[1:-1] not in shown
