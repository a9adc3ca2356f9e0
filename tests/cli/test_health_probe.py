"""`health-probe` against servers on real sockets: its output for healthy, unhealthy, silent and absent
ones."""

import os
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import trustme

from tgis.cli import main as cli
from tgis.cli.health_probe import health_probe
from tgis.config.network import PortOptions, ProbeConfig
from tgis.config.option import declared, env_of

START = "from tgis.cli.health_probe import health_probe; health_probe()"
LEFT_OUT = {"torch", "grpc", "asyncio", "numpy", "transformers"}


def probe(*flags: str, code: str = START, **env: str) -> tuple[int, str]:
    """Return the exit status and the output."""
    completed = subprocess.run(
        [sys.executable, "-c", code, *flags],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert not completed.stdout
    return completed.returncode, completed.stderr


def answer(status: str, text: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\ncontent-length: {len(text)}\r\n\r\n{text}".encode()


@contextmanager
def server(
    *parts: bytes, tls: ssl.SSLContext | None = None, pause: float = 0.0
) -> Iterator[tuple[int, list[bytes]]]:
    """Serve one connection with these parts, with pauses; yield the port and the bytes received."""
    asked: list[bytes] = []

    def serve() -> None:
        connection, _ = listener.accept()
        with connection if tls is None else tls.wrap_socket(connection, server_side=True) as open_one:
            asked.append(open_one.recv(4096))
            for part in parts:
                try:
                    open_one.sendall(part)
                except OSError:  # the probe has disconnected
                    return
                over.wait(pause)
            over.wait(pause)

    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listener.getsockname()[1], asked
        finally:
            over.set()
            thread.join()


@pytest.mark.parametrize(
    ("flags", "path", "sent", "code", "said"),
    [
        ([], "/health", answer("200 OK"), 0, "200 OK"),
        (["--live"], "/live", answer("200 OK"), 0, "200 OK"),
        (
            [],
            "/health",
            answer("503 Service Unavailable", '{"error":"unhealthy"}'),
            1,
            '503 {"error":"unhealthy"}',
        ),
        ([], "/health", answer("302 Found"), 1, "302 Found"),
        ([], "/health", answer("500 Oh", "two\nlines"), 1, "500 two lines"),
        ([], "/health", b"SSH-2.0\r\n\r\n", 1, "SSH-2.0"),
        ([], "/health", b"", 1, "Remote end closed connection without response"),
    ],
)
def test_output_and_exit_code(flags: list[str], path: str, sent: bytes, code: int, said: str) -> None:
    with server(sent) as (port, asked):
        result = probe(*flags, PORT=str(port))
    assert result == (code, f"http://127.0.0.1:{port}{path}: {said}\n")
    assert asked[0].startswith(f"GET {path} HTTP/1.1\r\n".encode())


def test_no_service_is_listening() -> None:
    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))
        code, said = probe("--port", str(unheard.getsockname()[1]))
    assert (code, said.count("\n")) == (1, 1)
    assert "Connection refused" in said


@pytest.mark.parametrize("parts", [[], [b"H"] * 100, [b"HTTP/1.1 200 OK\r\n", *[b"x: y\r\n"] * 100]])
def test_its_time_is_limited(parts: Sequence[bytes]) -> None:
    """Servers that are silent, or send one byte at a time."""
    began = time.monotonic()
    with server(*parts, pause=0.2 if parts else 30) as (port, _):
        code, said = probe("--timeout", "0.5", PORT=str(port))
    assert (code, said) == (1, f"http://127.0.0.1:{port}/health: no response within 0.5 s\n")
    assert time.monotonic() - began < 10


def test_the_certificate_need_not_name_this_host() -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trustme.CA().issue_cert("inference-server.team.svc").configure_cert(context)
    with server(answer("200 OK"), tls=context) as (port, _):
        result = probe(PORT=str(port), HTTP_TLS="true")
    assert result == (0, f"https://127.0.0.1:{port}/health: 200 OK\n")


@pytest.mark.parametrize(
    ("bind", "asked"),
    [("0.0.0.0", "127.0.0.1"), ("::", "[::1]"), ("127.0.0.9", "127.0.0.9"), ("localhost",) * 2],
)
def test_it_asks_where_the_service_listens(bind: str, asked: str) -> None:
    assert probe("--port", "1", BIND=bind)[1].startswith(f"http://{asked}:1/health: ")


@pytest.mark.parametrize(
    ("flags", "env", "said"),
    [
        (["--dead"], {}, "No such option '--dead'."),
        ([], {"PORT": "http"}, "'http' is not a valid integer."),
        ([], {"HTTP_TLS": "yes"}, "'yes' is neither true nor false."),
    ],
)
def test_usage_errors_are_one_line_too(flags: list[str], env: dict[str, str], said: str) -> None:
    code, text = probe(*flags, **env)
    assert (code, text.count("\n")) == (1, 1)
    assert said in text


def test_it_reads_the_same_options_as_the_service() -> None:
    ours = {f.name: (env_of(f), f.default) for f, _, _ in declared(ProbeConfig) if env_of(f)}
    theirs = {f.name: (env_of(f), f.default) for f, _, _ in declared(PortOptions)}
    assert len(ours) == 3
    assert ours.items() <= theirs.items()


def test_it_loads_little() -> None:
    """The probe imports no module that takes long to load."""
    code = f"import sys, tgis.cli.health_probe; print(sorted({LEFT_OUT} & set(sys.modules)), file=sys.stderr)"
    assert probe(code=code) == (0, "[]\n")


def test_it_is_a_command_beside_others() -> None:
    assert cli.main.commands["health-probe"] is cli.server_main.commands["health-probe"] is health_probe
