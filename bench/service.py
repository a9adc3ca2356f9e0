"""Launches a service for a measurement: it is ready when the block is entered, and stopped when it is
left."""

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
    """Error for a measurement that cannot be made; its text is the reason."""


def first_line(error: BenchError) -> str:
    return str(error).partition("\n")[0]


def exit_on_sigterm() -> None:
    """Raise an exception on the signal, so that services are stopped."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


@contextmanager
def launch(
    model: Path, log: Path, options: Sequence[str], directory: Path | None = None
) -> Iterator[tuple[str, list[str]]]:
    """Yield the gRPC target and the command of a service of the package in `directory`, by default this one.

    Raises BenchError if the service does not become ready."""
    port, grpc_port = free_ports(2)
    command = [sys.executable, "-m", "tgis", "launcher", "--bind", "127.0.0.1"]
    command += ["--model-name", str(model.absolute())]
    command += ["--port", str(port), "--grpc-port", str(grpc_port), *options]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        # In a separate session, so that an interrupt at the terminal reaches only this process.
        process = subprocess.Popen(
            command, cwd=directory, stdout=output, stderr=output, start_new_session=True
        )
        try:
            _wait_until_ready(process, f"http://127.0.0.1:{port}/health", log)
            yield f"127.0.0.1:{grpc_port}", command
        finally:
            stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    """Send SIGTERM and, if that does not end the process in time, SIGKILL to it and its children."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    # Proxies of the environment do not apply to the loopback interface.
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
    """Return free ports. They are held together before any is released, so that they differ."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()
