"""Tests bearer tokens at a real router: who is admitted, and how tokens are replaced."""

import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from click.testing import CliRunner, Result
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.support.router.messages import batch, single
from tests.support.router.router_process import Setup, start_router, stop_router
from tgis.cli.client.command import command as client
from tgis.pb import generation_pb2 as pb

OLD, NEW = "old-secret", "new-secret"
REFUSED = grpc.StatusCode.UNAUTHENTICATED


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def guarded(home: Path) -> Iterator[Setup]:
    (home / "tokens").write_text(f"{OLD}\nanother\n\ntenant acme named\n")
    setup = start_router(home, 1, "--auth-tokens-path", str(home / "tokens"))
    yield setup
    assert stop_router(setup) == 0
    assert OLD not in setup.service.output
    assert NEW not in setup.service.output


def statuses(setup: Setup, *values: str) -> set[grpc.StatusCode]:
    """Return the statuses of a unary call and a stream."""
    metadata = [("authorization", value) for value in values]
    codes = set()
    try:
        setup.stub.ModelInfo(pb.ModelInfoRequest(), metadata=metadata, timeout=5)
        codes.add(grpc.StatusCode.OK)
    except grpc.RpcError as error:
        codes.add(error.code())
    try:
        list(setup.stub.GenerateStream(single("a"), metadata=metadata, timeout=5))
        codes.add(grpc.StatusCode.OK)
    except grpc.RpcError as error:
        codes.add(error.code())
    return codes


def status(setup: Setup, *values: str) -> grpc.StatusCode:
    [code] = statuses(setup, *values)
    return code


@pytest.mark.parametrize("value", [f"Bearer {OLD}", f"bearer {OLD}", "Bearer another", "Bearer named"])
def test_any_of_the_tokens_lets_in(guarded: Setup, value: str) -> None:
    assert status(guarded, value) is grpc.StatusCode.OK


@pytest.mark.parametrize(
    "values",
    [
        (),
        (OLD,),
        ("Bearer ",),
        (f"Bearer {OLD}x",),
        (f"Bearer {OLD[:-1]}",),
        (f"Basic {OLD}",),
        (f"Bearer {OLD} another",),
        ("Bearer acme",),
        ("Bearer tenant acme named",),
        (f"Bearer {OLD}", f"Bearer {OLD}"),
    ],
)
def test_nothing_else_does(guarded: Setup, values: tuple[str, ...]) -> None:
    assert status(guarded, *values) is REFUSED


def test_health_may_be_asked_by_all_and_nothing_else(guarded: Setup) -> None:
    answer = health_pb2_grpc.HealthStub(guarded.channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    with pytest.raises(grpc.RpcError) as refused:
        guarded.stub.Generate(batch("a"), timeout=5)
    assert refused.value.details() == "a valid bearer token is required"
    with pytest.raises(grpc.RpcError) as unknown:
        guarded.channel.unary_unary("/fmaas.GenerationService/NoSuch")(b"", timeout=5)
    assert unknown.value.code() is REFUSED


def test_our_own_client_gets_in(guarded: Setup, home: Path) -> None:
    def run(command: str, *token: str) -> Result:
        target = f"127.0.0.1:{guarded.service.grpc_port}"
        text = [] if command == "info" else ["a"]
        return CliRunner().invoke(client, [command, *text, "--target", target, *token])

    for command in ("generate", "stream", "tokenize", "info"):
        assert run(command, "--token", "another").exit_code == 0
        assert run(command, "--token-path", str(home / "tokens")).exit_code == 0
        result = run(command)
        assert result.exit_code == 1
        assert result.stderr == "error: UNAUTHENTICATED: a valid bearer token is required\n"


def test_tokens_are_replaced_under_way(guarded: Setup, home: Path) -> None:
    def wait_for(expected: grpc.StatusCode, token: str) -> None:
        deadline = time.monotonic() + 30
        while statuses(guarded, f"Bearer {token}") != {expected}:  # the file may be read between two calls
            assert time.monotonic() < deadline
            time.sleep(0.1)

    (home / "tokens").write_text(f"{OLD}\n{NEW}\n")
    wait_for(grpc.StatusCode.OK, NEW)
    assert status(guarded, f"Bearer {OLD}") is grpc.StatusCode.OK
    (home / "tokens").write_text("")  # as if only half-written
    time.sleep(1.2)
    assert status(guarded, f"Bearer {OLD}") is grpc.StatusCode.OK
    (home / "tokens").write_text(f"{NEW}\n")
    wait_for(REFUSED, OLD)
    assert status(guarded, f"Bearer {NEW}") is grpc.StatusCode.OK


def test_a_file_without_tokens_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"error: the file of bearer tokens .*nowhere cannot be read"):
        start_router(tmp_path, 1, "--auth-tokens-path", str(tmp_path / "nowhere"))
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(AssertionError, match=r"error: the file of bearer tokens .* has no token"):
        start_router(tmp_path, 1, "--auth-tokens-path", str(tmp_path / "empty"))
