"""`tgis top` with a real router: in a terminal, in a pipe, over TLS, and while the router restarts."""

import fcntl
import os
import pty
import re
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trustme

from tests.support.router.router_process import Setup, start_router, stop_router
from tgis.cli.top.scrape import ScrapeError, Source, Trust, scrape
from tgis.pb import generation_pb2 as pb

COMMAND = [sys.executable, "-m", "tgis", "top"]
NAME = "inference-server.example"
WIDTH, HEIGHT = 90, 12
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
COLOUR = re.compile(r"\x1b\[[0-9;]*3[0-7]m")
HOME, ENTER, LEAVE = "\x1b[H", "\x1b[?1049h", "\x1b[?1049l"
HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("pem")
    authority = trustme.CA()
    server = authority.issue_cert(NAME)
    authority.cert_pem.write_to_path(directory / "ca.pem")
    server.private_key_pem.write_to_path(directory / "key.pem")
    server.cert_chain_pems[0].write_to_path(directory / "cert.pem")
    return directory


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    with running(tmp_path_factory.mktemp("router"), "--max-concurrent-requests", "20") as setup:
        yield setup


@contextmanager
def running(directory: Path, *flags: str) -> Iterator[Setup]:
    setup = start_router(directory, 1, *flags)
    try:
        yield setup
    finally:
        code = stop_router(setup)
    assert code == 0, setup.service.output


def target_of(setup: Setup) -> str:
    return f"127.0.0.1:{setup.service.http_port}"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=30)


def request(num_tokens: int) -> pb.SingleGenerationRequest:
    stopping = pb.StoppingCriteria(max_new_tokens=num_tokens, min_new_tokens=num_tokens)
    return pb.SingleGenerationRequest(
        request=pb.GenerationRequest(text="fox"), params=pb.Parameters(stopping=stopping)
    )


def numbers(frame: str, name: str) -> list[float]:
    [line] = [line for line in frame.splitlines() if line.strip().startswith(name)]
    return [float(text) for text in re.findall(r"\d+\.?\d*", line.replace(",", ""))]


def test_once_prints_the_difference_of_two_scrapes(router: Setup) -> None:
    router.shards[0].step_s = 0.05  # so that the stream outlasts a slow start of the command
    stream = router.stub.GenerateStream(request(150))
    next(stream)
    done = run("--target", target_of(router), "--once", "--interval", "0.7")
    router.shards[0].step_s = 0.001
    list(stream)
    assert (done.returncode, done.stderr) == (0, "")
    frame = done.stdout
    assert "\x1b" not in frame
    assert frame.startswith(f"tgis top    {target_of(router)}  ready  ")
    assert numbers(frame, "requests") == [0, 1, 1, 1, 20]
    assert 0 < numbers(frame, "tokens/s")[0] <= 22, "at most one answer more than steps fit between the looks"
    p50, p95, *_ = numbers(frame, "next token")
    assert 30 <= p50 <= p95
    assert numbers(frame, "next_token")[-1] == 1.0, "one sequence a step"
    assert numbers(frame, "first token") == [0.0], "no times, and none a second"
    assert "failures    none" in frame
    assert "certificate none" in frame
    assert numbers(frame, "shards      ") == [0]


def test_once_without_a_service_is_one_line() -> None:
    done = run("--target", "localhost:1", "--once")
    line = "error: localhost:1: Connection refused\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", line)


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("localhost:port", "the port is not a number"),
        ("ftp://localhost", "neither host and port nor an http or https URL"),
        ("https://", "neither host and port nor an http or https URL"),
    ],
)
def test_an_invalid_target_is_reported(target: str, reason: str) -> None:
    with pytest.raises(ScrapeError, match=reason):
        scrape(Source(target, Trust()))


def test_unreadable_certificate_authorities_are_reported(tmp_path: Path) -> None:
    for name, reason in (("none", "No such file"), ("empty", "cannot be read")):
        (tmp_path / "empty").write_text("")
        with pytest.raises(ScrapeError, match=reason):
            scrape(Source("localhost:1", Trust(ca_cert=str(tmp_path / name))))


ANSWERS = {
    "no HTTP": (b"SSH-2.0-server\r\n", "the response is not HTTP: BadStatusLine"),
    "not found": (b"HTTP/1.0 404 Not Found\r\n\r\n", "/metrics returns status 404"),
    "another's": (
        b"HTTP/1.0 200 OK\r\n\r\nup 1\n",
        "the response has no tgi_queue_size: this is another service",
    ),
    "a page": (b"HTTP/1.0 200 OK\r\n\r\n<html>\n", "the response is not in Prometheus' format: "),
    "nothing": (b"", "Remote end closed connection without response"),
}


@pytest.mark.parametrize("kind", ANSWERS)
def test_an_unexpected_answer_is_one_line(kind: str) -> None:
    answer, reason = ANSWERS[kind]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        thread = threading.Thread(target=answer_once, args=(listener, answer))
        thread.start()
        with pytest.raises(ScrapeError) as caught:
            scrape(Source(f"127.0.0.1:{port}", Trust()))
        thread.join()
    assert str(caught.value).startswith(reason)


def answer_once(listener: socket.socket, answer: bytes) -> None:
    connection, _ = listener.accept()
    with connection:
        connection.recv(1 << 16)
        connection.sendall(answer)
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)


class Screen:
    """Terminal that runs `tgis top`; `text` is everything that it has written."""

    def __init__(self, *arguments: str, **variables: str) -> None:
        self.fd, terminal = pty.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", HEIGHT, WIDTH, 0, 0))
        # readline sets LINES and COLUMNS of another terminal in the environment of a test process.
        own = {name: value for name, value in os.environ.items() if name not in ("LINES", "COLUMNS")}
        env = {**own, "TERM": "xterm", **variables}
        self.process = subprocess.Popen([*COMMAND, *arguments], stdin=terminal, stdout=terminal, env=env)
        os.close(terminal)
        self.text = ""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self.fd, 1 << 16)
            except OSError:  # Linux' error if the other end is closed
                return
            self.text += data.decode(errors="replace")

    @property
    def frames(self) -> list[str]:
        """Return the whole frames, without colours."""
        return [ESCAPE.sub("", frame) for frame in self.text.split(HOME)[1:-1]]

    def wait_for(self, is_there: Callable[[list[str]], bool], timeout_s: float = 20) -> None:
        deadline = time.monotonic() + timeout_s
        while not is_there(self.frames):
            assert time.monotonic() < deadline, self.text[-2000:]
            time.sleep(0.05)

    def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        code = self.process.wait(10)
        self._reader.join()
        os.close(self.fd)
        return code


def test_a_terminal_shows_the_service_go_and_come(authority: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    tls = ["--tls-cert-path", str(authority / "cert.pem"), "--tls-key-path", str(authority / "key.pem")]
    flags = [*tls, "--http-tls", "--port", str(port)]
    trust = ["--ca-cert", str(authority / "ca.pem"), "--server-name", NAME]
    screen = Screen("--target", f"127.0.0.1:{port}", "--interval", "0.2", "--window", "1", *trust)
    try:
        screen.wait_for(lambda frames: bool(frames) and "no response" in frames[-1])
        assert "Connection refused; retrying" in screen.frames[-1]
        for _ in range(2):
            num = len(screen.frames)
            with running(tmp_path, *flags):
                screen.wait_for(
                    lambda frames, num=num: any("first scrape" in frame for frame in frames[num:])
                )
                screen.wait_for(lambda frames: "the last 1 s" in frames[-1])
            screen.wait_for(lambda frames: "no response" in frames[-1])
    finally:
        code = screen.end(signal.SIGINT)
    assert code == 0
    assert screen.text.startswith((ENTER, HIDE_CURSOR))
    assert screen.text.index(ENTER) < screen.text.index(HOME) < screen.text.rindex(LEAVE)
    assert screen.text.rindex(HIDE_CURSOR) < screen.text.rindex(SHOW_CURSOR)
    assert screen.text.endswith((LEAVE, SHOW_CURSOR))
    assert COLOUR.search(screen.text), "no response is red"
    lines = [line for frame in screen.frames for line in frame.split("\r\n")]
    assert max(map(len, lines)) <= WIDTH
    assert max(frame.count("\r\n") for frame in screen.frames) < HEIGHT


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_terminal_without_colours_is_left_as_it_was(number: signal.Signals) -> None:
    screen = Screen("--target", "localhost:1", "--interval", "0.1", NO_COLOR="1")
    try:
        screen.wait_for(lambda frames: bool(frames) and "no response" in frames[-1])
    finally:
        code = screen.end(number)
    assert code == 0
    assert screen.text.endswith((LEAVE, SHOW_CURSOR))
    assert not COLOUR.search(screen.text)


@pytest.mark.slow
def test_a_certificate_of_another_name_is_refused(authority: Path, tmp_path: Path) -> None:
    tls = ["--tls-cert-path", str(authority / "cert.pem"), "--tls-key-path", str(authority / "key.pem")]
    with running(tmp_path, *tls, "--http-tls") as setup:
        known = ["--target", f"https://{target_of(setup)}", "--ca-cert", str(authority / "ca.pem"), "--once"]
        refused = run(*known)
        assert refused.returncode == 1
        assert "certificate" in refused.stderr.lower()
        assert refused.stderr.count("\n") == 1
        seen = run(*known, "--server-name", NAME, "--interval", "0.1")
        assert re.search(r"^certificate \d+\.\d days left$", seen.stdout, re.MULTILINE), seen.stdout


@pytest.mark.slow
def test_a_pipe_gets_plain_frames_and_one_line_for_an_absence(router: Setup) -> None:
    command = [*COMMAND, "--target", target_of(router), "--interval", "0.1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watching:
        assert watching.stdout is not None
        heads = []
        while len(heads) < 3:
            line = watching.stdout.readline()
            assert "\x1b" not in line
            heads += [line] * line.startswith("tgis top")
        watching.send_signal(signal.SIGINT)
        watching.stdout.read()
        assert watching.wait(10) == 0
    assert "first scrape" in heads[0]
    absent = [*COMMAND, "--target", "localhost:1", "--interval", "0.1"]
    with subprocess.Popen(absent, stdout=subprocess.PIPE, text=True) as watching:
        assert watching.stdout is not None
        first = watching.stdout.readline()
        time.sleep(0.5)
        watching.send_signal(signal.SIGINT)
        assert watching.stdout.read() == ""
        assert watching.wait(10) == 0
    assert first == "localhost:1: Connection refused; retrying\n"
