"""Check the listener for step streams over TCP, whose thread must never wait for an unauthenticated
client."""

import socket
import ssl
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import pytest
import trustme

from tests.support.link_files import LinkFiles
from tgis.net.framing import FrameReader, frame
from tgis.net.tls import Certificates, TlsFiles, mutual_client_context, mutual_server_context
from tgis.pb import shard_pb2 as pb
from tgis.shard.transport import tls_listener
from tgis.shard.transport.step_stream import StepSocket
from tgis.shard.transport.tls_listener import TlsListener


class Ends(NamedTuple):
    steps: StepSocket
    address: tuple[str, int]
    context: ssl.SSLContext
    """The TLS context of a router."""

    def open(self, stack: ExitStack) -> ssl.SSLSocket:
        """Open a connection as a router does."""
        plain = socket.create_connection(self.address, timeout=10)
        return stack.enter_context(self.context.wrap_socket(plain, server_hostname="localhost"))

    def connect(self, stack: ExitStack) -> ssl.SSLSocket:
        """Open a connection and return it once its stream is the newest."""
        connection = self.open(stack)
        assert self.steps.receive() is None
        self.steps.accept()
        return connection


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ends]:
    files = LinkFiles(tmp_path_factory.mktemp("link") / "own").write(trustme.CA(), "localhost")
    paths = TlsFiles(*(str(files.path(name)) for name in ("cert", "key", "ca")))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        steps = StepSocket(TlsListener(listener, Certificates(paths, mutual_server_context, "link")))
        client = Certificates(paths, mutual_client_context, "link")
        yield Ends(steps, listener.getsockname(), client.context)
        steps._end("the tests are over")


def step(number: int, num_bytes: int = 0) -> pb.StepRequest:
    return pb.StepRequest(step_id=number, rows=bytes(num_bytes))


@contextmanager
def soon(timeout_s: float = 20) -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < timeout_s


def test_steps_of_any_size_arrive_whole(ends: Ends) -> None:
    """Check steps larger than a TLS record, and several steps in one record."""
    sent = [step(1), step(2, 100_000), step(3), step(4, 40_000), step(5)]
    with ExitStack() as stack:
        router = ends.connect(stack)
        router.sendall(b"".join(map(frame, sent)))
        received: list[pb.StepRequest] = []
        while len(received) < len(sent):
            received += ends.steps.receive() or []
        assert received == sent
        ends.steps.send(pb.StepResponse(step_id=5))
        assert FrameReader().push(router.recv(1 << 16)) == [pb.StepResponse(step_id=5).SerializeToString()]


def test_half_a_record_does_not_keep_a_newer_router_waiting(ends: Ends) -> None:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    router = ends.context.wrap_bio(incoming, outgoing, server_hostname="localhost")
    with socket.create_connection(ends.address, timeout=10) as plain, ExitStack() as stack:
        while True:
            try:
                router.do_handshake()
                break
            except ssl.SSLWantReadError:
                plain.sendall(outgoing.read())
                incoming.write(plain.recv(1 << 16))
        plain.sendall(outgoing.read())
        assert ends.steps.receive() is None
        ends.steps.accept()
        router.write(frame(step(1, 5000)))
        with ThreadPoolExecutor(1) as threads, soon():
            waiting = threads.submit(ends.steps.receive)
            plain.sendall(outgoing.read()[:2000])
            time.sleep(0.2)
            newer = ends.open(stack)
            assert waiting.result(30) is None
            ends.steps.accept()
            newer.sendall(frame(step(7)))
            assert ends.steps.receive() == [step(7)]


def strangers(ends: Ends, stack: ExitStack, count: int) -> list[socket.socket]:
    """Open connections that start a handshake and then send nothing."""
    results = []
    for _ in range(count):
        results.append(stack.enter_context(socket.create_connection(ends.address, timeout=30)))
        results[-1].sendall(b"\x16\x03\x01")
    return results


def test_silent_connections_block_no_other(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls_listener, "HANDSHAKE_S", 1.0)
    monkeypatch.setattr(tls_listener, "CHECK_S", 0.1)
    with ExitStack() as stack, soon():
        router = ends.connect(stack)
        silent = strangers(ends, stack, 5)
        router.sendall(frame(step(1)))
        assert ends.steps.receive() == [step(1)], "they are not even noticed"
        newer = ends.connect(stack)
        newer.sendall(frame(step(2)))
        assert ends.steps.receive() == [step(2)]
        assert [one.recv(1) for one in silent] == [b""] * len(silent), "all are closed in the end"


def test_of_too_many_the_oldest_is_given_up(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls_listener, "HANDSHAKE_S", 60)
    with ExitStack() as stack, soon():
        silent = strangers(ends, stack, tls_listener.MAX_HANDSHAKES + 8)
        assert [one.recv(1) for one in silent[:8]] == [b""] * 8
        newer = ends.connect(stack)
        newer.sendall(frame(step(1)))
        assert ends.steps.receive() == [step(1)]


def test_a_router_that_reads_nothing_is_given_up(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls_listener, "SEND_S", 0.3)
    with ExitStack() as stack, soon():
        ends.connect(stack)
        for number in range(64):
            ends.steps.send(pb.StepResponse(step_id=number, rows=bytes(1 << 20)))
        newer = ends.connect(stack)
        newer.sendall(frame(step(1)))
        assert ends.steps.receive() == [step(1)]
