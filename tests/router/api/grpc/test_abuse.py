"""Attacks the gRPC and the HTTP port while another client makes calls. The other client must notice nothing,
no resources may remain in use, and the same process must serve afterwards."""

import contextlib
import gzip
import json
import re
import socket
import time
import zlib
from collections.abc import Iterator

import grpc
import pytest

from tests.support.router import attacks
from tests.support.router.attacks import SERVICE, Bystander
from tests.support.router.grammars import DEEP_RULES, SLOW
from tests.support.router.http2 import (
    ACK,
    END_HEADERS,
    END_STREAM,
    Connection,
    Frame,
    Kind,
    call_headers,
    frame,
    header_block,
    message,
)
from tests.support.router.http_port import get, metric
from tests.support.router.messages import batch
from tests.support.router.router_process import Setup, start_router, stop_router
from tests.support.router.router_usage import RouterProcesses
from tgis.pb import generation_pb2 as pb

HOST, SEED = "127.0.0.1", 20
SLOWEST_S = 60.0  # limit for the other client's calls, on a machine that others use too
GROWTH_MIB = 60
PIPES = 2  # pipes of another process that compiles constraints, because two calls arrive at once
IDLE = ("tgi_requests_live", "tgi_permits_used", "tgi_queue_size", "tgi_kv_cache_usage_ratio")
TOO_MANY_PINGS = b"too_many_pings"
COUNTS = {  # in every run, and in the slow test
    "rapid_reset": (3_000, 20_000),
    "endless_headers": (1_000, 3_000),
    "settings_flood": (3_000, 20_000),
    "ping_flood": (1_000, 20_000),
    "odd_frames": (19, 400),
    "garbage": (24, 400),
}
REQUEST = batch("a girl").SerializeToString()
GENERATE = SERVICE + "Generate"


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    setup = start_router(tmp_path_factory.mktemp("abuse"), 1, "--max-batch-size", "16")
    setup.stub.Generate(batch("a", decoding=pb.DecodingParameters(regex="a")))  # starts the compiler
    yield setup
    assert stop_router(setup) == 0, setup.service.output
    assert "Traceback" not in setup.service.output
    assert "Unexpected" not in setup.service.output


class Baseline:
    """Resources that the router uses without calls."""

    def __init__(self, setup: Setup) -> None:
        self.setup, self.processes = setup, RouterProcesses(setup)
        self.num_tasks = metric(setup, "tgi_tasks")
        self.num_fds, self.rss = self.processes.num_fds, self.processes.rss

    def is_back(self) -> bool:
        return (
            metric(self.setup, "tgi_tasks") <= self.num_tasks
            and not any(metric(self.setup, name) for name in IDLE)
            and self.processes.num_fds <= self.num_fds + PIPES
        )

    def check(self) -> None:
        deadline = time.monotonic() + 20
        while not self.is_back():
            assert time.monotonic() < deadline, (metric(self.setup, "tgi_tasks"), self.processes.num_fds)
            time.sleep(0.05)
        assert self.processes.rss - self.rss < GROWTH_MIB << 20


@pytest.fixture(scope="module")
def baseline(router: Setup) -> Baseline:
    return Baseline(router)


@contextlib.contextmanager
def undisturbed(baseline: Baseline) -> Iterator[None]:
    with Bystander(HOST, baseline.setup.service.grpc_port) as bystander:
        yield
    assert bystander.lost == []
    assert bystander.slowest_s < SLOWEST_S
    baseline.check()


def test_all_attacks_are_made() -> None:
    assert set(COUNTS) == set(attacks.FLOODS)


@pytest.mark.parametrize("is_long", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", COUNTS)
def test_floods(router: Setup, baseline: Baseline, name: str, is_long: bool) -> None:
    with undisturbed(baseline):
        attacks.FLOODS[name](HOST, router.service.grpc_port, COUNTS[name][is_long], SEED)


@pytest.mark.parametrize("count", [400, pytest.param(5_000, marks=pytest.mark.slow)])
def test_damaged_messages(router: Setup, baseline: Baseline, count: int) -> None:
    with undisturbed(baseline):
        outcomes = attacks.mutated_messages(HOST, router.service.grpc_port, count, SEED)
    status = grpc.StatusCode
    codes = {outcome.code for outcome in outcomes}
    assert {status.OK, status.INVALID_ARGUMENT} <= codes
    allowed = {status.OK, status.INVALID_ARGUMENT, status.NOT_FOUND}  # Health's status for unknown services
    assert [outcome for outcome in outcomes if outcome.code not in allowed] == []
    assert len({outcome.method for outcome in outcomes if outcome.code is status.OK}) == 6


def test_a_flood_of_pings_gets_enhance_your_calm(router: Setup) -> None:
    frames = attacks.ping_flood(HOST, router.service.grpc_port, 100, SEED)
    assert [each.payload[8:] for each in frames if each.kind == Kind.GOAWAY] == [TOO_MANY_PINGS]


@pytest.mark.slow
def test_polite_pings_of_an_idle_connection_are_answered(router: Setup) -> None:
    """Clients that check their connection ping every 30 s; here as often as the server allows."""
    with Connection(HOST, router.service.grpc_port) as connection:
        connection.send(frame(Kind.SETTINGS, flags=ACK))
        frames: list[Frame] = []
        for _ in range(6):
            connection.send(frame(Kind.PING, b"politely"))
            frames += connection.frames(10.5)
        connection.call(1, GENERATE, REQUEST)
        frames += connection.frames(1)
    assert sum(each.kind == Kind.PING and each.payload == b"politely" for each in frames) == 6
    assert not any(each.kind == Kind.GOAWAY for each in frames)
    assert any(each.kind == Kind.DATA for each in frames)


def status_of(port: int, path: str, body: bytes, *headers: tuple[str, str]) -> int:
    """Return the status of a call sent as raw frames, or -1 if the stream is reset."""
    with Connection(HOST, port) as connection:
        parts = [body[i : i + 16384] for i in range(0, len(body), 16384)]
        connection.send(frame(Kind.HEADERS, header_block(call_headers(path, *headers)), END_HEADERS, 1))
        for i, part in enumerate(parts):
            connection.send(frame(Kind.DATA, part, END_STREAM if i == len(parts) - 1 else 0, 1))
        for each in connection.frames():
            if each.kind == Kind.RST_STREAM:
                return -1
            if each.kind == Kind.HEADERS and (match := re.search(rb"grpc-status.(\d+)", each.payload)):
                return int(match[1])
    raise AssertionError("no answer")


BOMB = gzip.compress(bytes(60 << 20))
PLAIN_CALLS: dict[str, tuple[int, str, list[tuple[str, str]]]] = {
    "usual": (0, GENERATE, []),
    "no content type": (0, GENERATE, [("content-type", "")]),  # gRPC ignores it
    "another content type": (0, GENERATE, [("content-type", "application/json")]),
    "another HTTP method": (-1, GENERATE, [(":method", "GET")]),
    "an unknown method": (12, GENERATE + "d", []),
    "an unknown service": (12, "/fmaas.Generation/Generate", []),
    "no method": (12, "/", []),
    "no path": (12, "", []),
    "no compression": (0, GENERATE, [("grpc-encoding", "identity")]),
    "a deadline that is none": (13, GENERATE, [("grpc-timeout", "soon")]),
    "a deadline that has passed": (4, GENERATE, [("grpc-timeout", "0n")]),
}
COMPRESSED_CALLS: dict[str, tuple[int, bytes, list[tuple[str, str]]]] = {
    "gzip": (0, gzip.compress(REQUEST), [("grpc-encoding", "gzip")]),
    "deflate": (0, zlib.compress(REQUEST), [("grpc-encoding", "deflate")]),
    "in an unknown way": (13, REQUEST, [("grpc-encoding", "br")]),
    "no gzip in gzip": (13, REQUEST, [("grpc-encoding", "gzip")]),
    "without saying how": (13, REQUEST, []),
    "60 MiB in 60 kB": (8, BOMB, [("grpc-encoding", "gzip")]),
}


@pytest.mark.parametrize("name", PLAIN_CALLS)
def test_odd_calls(router: Setup, name: str) -> None:
    expected, path, headers = PLAIN_CALLS[name]
    assert status_of(router.service.grpc_port, path, message(REQUEST), *headers) == expected


@pytest.mark.parametrize("name", COMPRESSED_CALLS)
def test_compressed_calls(router: Setup, name: str) -> None:
    expected, data, headers = COMPRESSED_CALLS[name]
    assert status_of(router.service.grpc_port, GENERATE, message(data, True), *headers) == expected


def test_odd_calls_leave_no_resources(baseline: Baseline) -> None:
    baseline.check()


def open_http(setup: Setup, data: bytes) -> socket.socket:
    end = socket.create_connection((HOST, setup.service.http_port), 30)
    end.sendall(data)
    return end


def test_half_requests_do_not_use_up_the_http_port(router: Setup, baseline: Baseline) -> None:
    with undisturbed(baseline):
        with contextlib.ExitStack() as ends:
            for i in range(300):
                ends.enter_context(open_http(router, b"GET /metrics HTTP/1.1\r\nHost: a\r\n"[: i % 30]))
            assert get(router.http + "/health") == (200, "")
            deadline = time.monotonic() + 30
            while baseline.processes.num_fds - baseline.num_fds >= 150:
                assert time.monotonic() < deadline
                time.sleep(0.01)


@pytest.mark.slow
def test_http_that_does_not_finish_is_cut_off(router: Setup, baseline: Baseline) -> None:
    """Send half a request, and leave an answer unread."""
    many = b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n" * 100
    with undisturbed(baseline):
        with contextlib.ExitStack() as stack:
            ends = [stack.enter_context(open_http(router, b"GET /hea")) for _ in range(20)]
            ends += [stack.enter_context(open_http(router, many)) for _ in range(20)]
            deadline = time.monotonic() + 30
            while not baseline.processes.num_fds <= baseline.num_fds + PIPES + 4:  # of the other client
                assert time.monotonic() < deadline
                time.sleep(0.1)


def test_exponential_grammars(router: Setup, baseline: Baseline) -> None:
    """Send short constraints that would take for ever to compile, and one of a megabyte."""
    bombs = [{"json_schema": json.dumps(SLOW)}, {"grammar": DEEP_RULES}, {"regex": "(" * 3000 + ")" * 3000}]
    bombs += [{"json_schema": '{"enum": [' + '"x",' * 250_000 + '"x"]}'}]
    with undisturbed(baseline):
        for bomb in bombs:
            with pytest.raises(grpc.RpcError) as caught:
                router.stub.Generate(batch("a", decoding=pb.DecodingParameters(**bomb)))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
