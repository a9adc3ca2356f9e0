"""Sends requests to worker processes that can be killed: one line of JSON in, one line of JSON out."""

import asyncio
import contextlib
import signal
import subprocess
import sys
import threading
from collections.abc import Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from tgis.process.fair_queue import FairQueue

MAX_WAITING = 1024  # requests of one pool; each counts as one byte of its queue


class PoolBusyError(Exception):
    """Error for a request that does not fit into the queue of a pool."""


class Reply(NamedTuple):
    """Reply of a worker, or the exit status of a worker that did not reply."""

    value: Any
    """Decoded line; None if the worker died."""
    status: int = 0
    """Exit status of the worker that died."""

    @property
    def is_dead(self) -> bool:
        return self.value is None

    @property
    def is_killed(self) -> bool:
        """True if the cause may be a timeout or a busy machine instead of the request."""
        return -self.status in (signal.SIGKILL, signal.SIGTERM)


class Worker:
    """Process that answers one request at a time."""

    def __init__(self, module: str, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        # asyncio's subprocesses fork, which is not safe with gRPC's threads.
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # the last output of a crashing library may quote the user
            start_new_session=True,  # a terminal's Ctrl-C must reach only the router
        )

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, line: bytes) -> bytes:
        """Return the worker's reply line; empty if the worker is killed or crashes."""
        stdin = self._process.stdin
        stdout = self._process.stdout
        assert stdin is not None
        assert stdout is not None
        timer = threading.Timer(self._timeout_s, self._process.kill)
        timer.start()
        try:
            stdin.write(line + b"\n")
            stdin.flush()
            answer = stdout.readline()
        except (BrokenPipeError, ValueError):  # the worker ended, or the pool was closed
            answer = b""
        finally:
            timer.cancel()
        return answer if answer.endswith(b"\n") else b""

    def end(self) -> int:
        """Close the worker's pipes, wait for its end and return its exit status."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # the worker has not read everything
                self._process.stdin.close()
        if self._process.stdout is not None:
            self._process.stdout.close()
        return self._process.wait()

    def kill(self) -> None:
        self._process.kill()


@dataclass(eq=False)
class _Job:
    request: object
    reply: asyncio.Future[Reply] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class WorkerPool:
    """Worker processes that run one module, each served by a thread. They start on demand.

    Owners of requests are served in turn. If the queue is full, the newest request of the owner with the most
    requests is refused."""

    def __init__(self, module: str, num_workers: int, timeout_s: float) -> None:
        """Create the pool. A worker that has not replied after `timeout_s` is killed."""
        self._module = module
        self._timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix=module.rpartition(".")[0])
        self._num_workers = num_workers
        self._queue: FairQueue[_Job] = FairQueue(MAX_WAITING)
        self._tasks: set[asyncio.Task[None]] = set()
        self._lock = threading.Lock()
        self._idle: list[Worker] = []
        self._workers: set[Worker] = set()
        self._is_closed = False

    async def ask(self, request: object, owner: Hashable) -> Reply:
        """Return the reply of a free worker. If the worker is killed, a second one is tried.

        Raises PoolBusyError, and ValueError, OverflowError or RecursionError if the request cannot be
        serialized to JSON."""
        job = _Job(request)
        for refused in self._queue.push(owner, job, 1):
            refused.reply.set_exception(PoolBusyError())
        if len(self._tasks) < self._num_workers:
            self._tasks.add(asyncio.create_task(self._work()))
        try:
            return await job.reply
        except asyncio.CancelledError:
            self._queue.remove(owner, job)
            raise
        finally:
            del job  # an error's traceback refers to this frame; the cycle would keep the request alive

    def close(self) -> None:
        """Stop all workers. `ask` must not be called afterwards."""
        with self._lock:
            self._is_closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        while self._queue:
            self._queue.pop().reply.cancel()
        for worker in list(self._workers):
            worker.kill()
            worker.end()

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        while self._queue:
            job = self._queue.pop()
            try:
                reply = await loop.run_in_executor(self._threads, self._ask, job.request)
            except Exception as error:
                if not job.reply.done():
                    job.reply.set_exception(error)
            else:
                if not job.reply.done():
                    job.reply.set_result(reply)
            del job  # as above
        # A done callback would run after a request that immediately follows the last reply.
        self._tasks.discard(asyncio.current_task())

    def _ask(self, request: object) -> Reply:
        line = msgspec.json.encode(
            request
        )  # faster than json, whose use of the GIL would delay the event loop
        reply = Reply(None, -signal.SIGKILL)
        for _ in range(2):
            worker = self._take_worker()
            if worker is None:
                break
            reply = self._ask_worker(worker, line)
            if not reply.is_killed:
                break
        return reply

    def _ask_worker(self, worker: Worker, line: bytes) -> Reply:
        answer = worker.ask(line)
        if answer:
            with self._lock:
                self._idle.append(worker)
            return Reply(msgspec.json.decode(answer))
        with self._lock:
            self._workers.discard(worker)
        return Reply(None, worker.end())

    def _take_worker(self) -> Worker | None:
        """Return a live worker, or None if the pool is closed."""
        with self._lock:
            if self._is_closed:
                return None
            while self._idle:
                worker = self._idle.pop()
                if worker.is_alive:
                    return worker
                self._workers.discard(worker)
                worker.end()
            worker = Worker(self._module, self._timeout_s)
            self._workers.add(worker)
            return worker


def ask_once(module: str, request: object, timeout_s: float) -> Reply:
    """Start a worker for this request, wait for its reply and return it."""
    line = msgspec.json.encode(request)
    worker = Worker(module, timeout_s)
    answer = worker.ask(line)
    status = worker.end()
    return Reply(msgspec.json.decode(answer)) if answer else Reply(None, status)
