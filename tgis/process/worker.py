"""The two ends of a worker process, which answers one request at a time and can be killed. Requests and
replies are messages on a socket, which is the process's standard input."""

import contextlib
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection

STDIN = 0
IDLE_S = 2.0  # time without a request after which a process is idle


class _KillTimer(threading.Timer):
    """Started timer that kills a process."""

    def __init__(self, seconds: float, process: subprocess.Popen[bytes]) -> None:
        super().__init__(seconds, self._kill)
        self._process = process
        self.has_killed = False
        self.start()

    def _kill(self) -> None:
        self.has_killed = True
        self._process.kill()


class Worker:
    """Process that answers requests. It starts with the first request, and again after its death. Only one
    thread at a time may call `ask`."""

    def __init__(self, module: str, arguments: Sequence[str] = (), timeout_s: float | None = None) -> None:
        """Create a worker that runs a module. A process that has not replied after `timeout_s` is killed."""
        self._command = [sys.executable, "-m", module, *arguments]
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._is_closed = False

    def ask(self, request: bytes) -> bytes | int:
        """Return the reply, or the exit status of a process that was killed or crashed. Raises TimeoutError
        if it was killed because it had not replied in time."""
        process, connection = self._running()
        timer = None if self._timeout_s is None else _KillTimer(self._timeout_s, process)
        try:
            connection.send_bytes(request)
            return connection.recv_bytes()
        except (EOFError, OSError) as error:
            status = self.end()
            if timer is not None and timer.has_killed and status == -signal.SIGKILL:
                raise TimeoutError from error
            return status
        finally:
            if timer is not None:
                timer.cancel()

    def kill(self) -> None:
        """Kill the process. Any thread may call this."""
        process = self._process  # the other thread may forget it concurrently
        if process is not None:
            process.kill()

    def close(self) -> None:
        """Kill the process and wait for its end. One that is just starting is killed later. Any thread may
        call this; no request may follow."""
        self._is_closed = True
        process = self._process
        if process is not None:
            process.kill()
            process.wait()

    def end(self) -> int:
        """Close the socket, wait for the end of the process, and return its exit status; 0 if none runs."""
        if self._connection is not None:
            self._connection.close()
        status = 0 if self._process is None else self._process.wait()
        self._process = self._connection = None
        return status

    def _running(self) -> tuple[subprocess.Popen[bytes], Connection]:
        if self._process is not None and self._process.poll() is not None:
            self.end()  # it died while it was idle
        if self._process is None or self._connection is None:
            self._process, self._connection = self._start()
            if self._is_closed:
                self.kill()
        return self._process, self._connection

    def _start(self) -> tuple[subprocess.Popen[bytes], Connection]:
        ours, theirs = socket.socketpair()
        with theirs:
            connection = Connection(ours.detach())
            # asyncio's subprocesses fork, which is not safe with gRPC's threads.
            process = subprocess.Popen(
                self._command,
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # the last output of a crashing library may quote the user
                start_new_session=True,  # a terminal's Ctrl-C must reach only the router
            )
        return process, connection


def answer_requests(answer: Callable[[bytes], bytes], on_idle: Callable[[], None] = lambda: None) -> None:
    """Reply to requests, in the worker process, until the other end closes."""
    with contextlib.suppress(EOFError, ConnectionError), Connection(STDIN) as connection:
        while True:
            if not connection.poll(IDLE_S):
                on_idle()
            connection.send_bytes(answer(connection.recv_bytes()))
