"""Tokenizes long texts in a separate process. Short texts, which the router's threads tokenize, never wait
for long ones, and long texts do not block the router's interpreter."""

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from tgis.process.fair_queue import FairQueue
from tgis.router.errors import OVERLOADED, OverloadedError, RequestError

MAX_QUEUED_BYTES = 64 << 20
# Maximum time that the process spends on a text whose call has ended. Finishing a shorter text costs less
# than starting a new process.
ABANDONED_S = 2.0

T = TypeVar("T")


@dataclass(eq=False)
class _Job:
    """Call of a function with the tokenizer and other arguments."""

    function: Callable[..., object]
    arguments: tuple[object, ...]
    answer: asyncio.Future[Any] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class TokenizerProcess:
    """Client of the tokenizer process. The process answers one call at a time and serves connections in turn.
    It starts with the first call and is restarted if it dies."""

    def __init__(self, directory: Path) -> None:
        self._queue: FairQueue[_Job] = FairQueue(MAX_QUEUED_BYTES)
        self._child = _Child(directory)
        # The thread must outlive the process: the kernel kills the process when the thread that started it
        # ends.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenizer process")
        self._worker: asyncio.Task[None] | None = None
        self._running: _Job | None = None

    async def run(
        self, function: Callable[..., T], *arguments: object, connection: Hashable, num_bytes: int
    ) -> T:
        """Call the module-level `function` with the tokenizer and `arguments`, and return its result.
        `num_bytes` is the size of its texts. Raises RequestError and OverloadedError."""
        job = _Job(function, arguments)
        for dropped in self._queue.push(connection, job, num_bytes):
            dropped.answer.set_result(OverloadedError(OVERLOADED))
        if self._worker is None:
            self._worker = asyncio.create_task(self._work(), name="tokenizer process")
        try:
            answer: T | Exception = await job.answer
        except asyncio.CancelledError:
            if not self._queue.remove(connection, job):
                asyncio.get_running_loop().call_later(ABANDONED_S, self._stop_computing, job)
            raise
        if isinstance(answer, Exception):
            try:
                raise answer
            finally:
                del answer  # its traceback refers to this frame, and the cycle would keep the texts alive
        return answer

    def close(self) -> None:
        """Stop the process. No call may follow."""
        self._child.close()
        self._thread.submit(self._child.reap)
        self._thread.shutdown(wait=False)

    async def _work(self) -> None:
        while self._queue:
            self._running = job = self._queue.pop()
            answer = await self._run(job)
            self._running = None
            if not job.answer.done():
                job.answer.set_result(answer)
            del job
        self._worker = None

    async def _run(self, job: _Job) -> object:
        """Return the result, or the exception to raise."""
        loop = asyncio.get_running_loop()
        try:
            for _ in range(2):  # the process may have been killed from outside
                answer = await loop.run_in_executor(
                    self._thread, self._child.ask, job.function, job.arguments
                )
                if answer is not None or job.answer.done():
                    return answer
        except Exception as error:
            return error
        return RequestError("tokenizer error the text could not be encoded", "text")

    def _stop_computing(self, job: _Job) -> None:
        if job is self._running:
            self._child.kill()


class _Child:
    """Tokenizer process and the router's end of its socket. Only one thread may start it and call it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._is_closed = False

    def ask(self, function: Callable[..., object], arguments: tuple[object, ...]) -> object:
        """Return the result, or None if the process dies first. Raises RuntimeError if it cannot start."""
        connection = self._connection or self._start()
        try:
            connection.send((function, arguments))
            return connection.recv()
        except (EOFError, OSError):
            self.reap()
            return None

    def kill(self) -> None:
        """Kill the process. Any thread may call this."""
        process = self._process  # the other thread may reap it concurrently
        if process is not None:
            process.kill()

    def close(self) -> None:
        """Kill the process, even if it is just starting. Any thread may call this."""
        self._is_closed = True
        self.kill()

    def reap(self) -> int:
        """Wait for the process to end, and return its exit status."""
        if self._connection is not None:
            self._connection.close()
        status = 0 if self._process is None else self._process.wait()
        self._process = self._connection = None
        return status

    def _start(self) -> Connection:
        ours, theirs = socket.socketpair()
        self._connection = connection = Connection(ours.detach())
        with theirs:
            fd = theirs.fileno()
            arguments = str(fd), str(self._directory), str(os.getpid())
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tgis.router.text.tokenizer_child", *arguments],
                pass_fds=[fd],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # the output of a crashing library may quote a user's text
                start_new_session=True,  # Ctrl-C in a terminal must reach only the router
            )
        if self._is_closed:
            self.kill()
        try:
            connection.recv()
        except (EOFError, OSError) as error:
            raise RuntimeError(f"the tokenizer process failed to start: exit status {self.reap()}") from error
        return connection
