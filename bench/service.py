"""A launched service for the time of a measurement: ready when the block is entered, gone when it is left."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

READY_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 30.0
POLL_S = 0.05
LAST_LINES = 15


class BenchError(Exception):
    """The measurement cannot be made; the text says why."""


def first_line(error: BenchError) -> str:
    return str(error).partition("\n")[0]


def exit_on_sigterm() -> None:
    """As an exception, so that services are stopped on the way out."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


@contextmanager
def launch(
    model: Path, log: Path, options: Sequence[str], directory: Path | None = None
) -> Iterator[tuple[str, list[str]]]:
    """Gives the gRPC target and the command, which runs the package that is in `directory`, if one is named.
    Raises BenchError where the service does not become ready."""
    port, grpc_port = free_ports(2)
    command = [sys.executable, "-m", "tgis", "launcher", "--bind", "127.0.0.1"]
    command += ["--model-name", str(model.absolute())]
    command += ["--port", str(port), "--grpc-port", str(grpc_port), *options]
    with log.open("wb") as output:
        # In a session of its own: an interrupt at the terminal is ours to handle, and ours alone.
        process = subprocess.Popen(
            command, cwd=directory, stdout=output, stderr=output, start_new_session=True
        )
        try:
            _wait_until_ready(process, f"http://127.0.0.1:{port}/health", log)
            yield f"127.0.0.1:{grpc_port}", command
        finally:
            stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM, and where that does not end it in time, SIGKILL to it and to what it started."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    # A proxy of the environment is not meant for the loopback interface.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    end = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < end:
        if process.poll() is not None:
            raise BenchError(f"the service ended with status {process.returncode}:\n{last_lines(log)}")
        try:
            with opener.open(url, timeout=5) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            pass  # not listening yet, or not healthy yet
        time.sleep(POLL_S)
    raise BenchError(f"the service was not ready after {READY_TIMEOUT_S:.0f} s:\n{last_lines(log)}")


def last_lines(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-LAST_LINES:])


def free_ports(count: int) -> list[int]:
    """Held together before any is given back, so that they differ."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()
