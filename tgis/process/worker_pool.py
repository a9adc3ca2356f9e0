"""Sends requests to worker processes that can be killed."""

import asyncio
import signal
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from tgis.process.fair_queue import FairQueue
from tgis.process.worker import Worker

MAX_WAITING = 1024  # requests of one pool, unless it limits their bytes
# Maximum time that a worker spends on a request whose caller has gone. Finishing a shorter one costs less
# than starting a new process.
ABANDONED_S = 2.0


class PoolBusyError(Exception):
    """Error for a request that does not fit into the queue of a pool."""


class Reply(NamedTuple):
    """Reply of a worker, or the exit status of a worker that did not reply."""

    value: Any
    """Decoded reply; None if the worker died."""
    status: int = 0
    """Exit status of the worker that died."""
    is_late: bool = False
    """True if the worker was killed because it had not replied in time. As workers limit their own CPU time,
    the cause is a busy machine, and not the request."""

    @property
    def is_dead(self) -> bool:
        return self.value is None

    @property
    def is_killed(self) -> bool:
        """True if the cause may be the machine instead of the request."""
        return -self.status in (signal.SIGKILL, signal.SIGTERM)


class Codec(NamedTuple):
    """Encoding of requests and replies. It runs in a pool's threads, because large ones would block the event
    loop."""

    encode: Callable[[Any], bytes]
    decode: Callable[[bytes], Any]


# It is faster than json, whose use of the GIL would delay the event loop.
JSON = Codec(msgspec.json.encode, msgspec.json.decode)


@dataclass(eq=False)
class _Job:
    request: object
    reply: asyncio.Future[Reply] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    worker: Worker | None = None
    """Worker that has the request."""


class WorkerPool:
    """Worker processes that run one module, each served by a thread. They start on demand.

    Owners of requests are served in turn. If the queue is full, the newest request of the owner with the most
    requests is refused."""

    def __init__(
        self,
        module: str,
        num_workers: int,
        timeout_s: float | None = None,
        *,
        arguments: Sequence[str] = (),
        codec: Codec = JSON,
        max_queued_bytes: int | None = None,
    ) -> None:
        """Create the pool. A worker that has not replied after `timeout_s` is killed. Without
        `max_queued_bytes`, the number of waiting requests is limited."""
        self._codec = codec
        self._idle = [Worker(module, arguments, timeout_s) for _ in range(num_workers)]
        self._busy: set[Worker] = set()
        # A thread lives as long as the pool: a worker may ask the kernel to kill it with its parent thread.
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix=module.rpartition(".")[0])
        self._queue: FairQueue[_Job] = FairQueue(max_queued_bytes or MAX_WAITING)
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False

    async def ask(self, request: object, owner: Hashable, num_bytes: int = 1) -> Reply:
        """Return the reply of a free worker. If the worker is killed by others, a second one is tried.

        `num_bytes` is the request's part of the queue. Raises PoolBusyError, and ValueError, OverflowError or
        RecursionError if the request cannot be encoded."""
        job = _Job(request)
        for refused in self._queue.push(owner, job, num_bytes):
            if not refused.reply.done():  # It is done if its caller was cancelled in this turn of the loop.
                refused.reply.set_exception(PoolBusyError())
        if self._idle:
            worker = self._idle.pop()
            self._busy.add(worker)
            self._tasks.add(asyncio.create_task(self._work(worker)))
        try:
            return await job.reply
        except asyncio.CancelledError:
            if not self._queue.remove(owner, job):
                asyncio.get_running_loop().call_later(ABANDONED_S, _abandon, job)
            raise
        finally:
            del job  # an error's traceback refers to this frame; the cycle would keep the request alive

    def close(self) -> None:
        """Stop all workers. `ask` must not be called afterwards."""
        self._is_closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        while self._queue:
            self._queue.pop().reply.cancel()
        for worker in (*self._busy, *self._idle):
            worker.close()
        for worker in self._idle:  # the threads of the others wait for their end
            worker.end()

    async def _work(self, worker: Worker) -> None:
        """Serve the queue with a worker until it is empty."""
        while self._queue:
            job = self._queue.pop()
            job.worker = worker
            try:
                reply = await self._serve(job, worker)
            except Exception as error:
                if not job.reply.done():
                    job.reply.set_exception(error)
            else:
                if not job.reply.done():
                    job.reply.set_result(reply)
            job.worker = None
            del job  # as above
        # A done callback would run after a request that immediately follows the last reply.
        self._busy.discard(worker)
        self._idle.append(worker)
        self._tasks.discard(asyncio.current_task())

    async def _serve(self, job: _Job, worker: Worker) -> Reply:
        reply = Reply(None, -signal.SIGKILL)
        for _ in range(2):
            if self._is_closed or job.reply.done():
                break
            loop = asyncio.get_running_loop()
            reply = await loop.run_in_executor(self._threads, _ask, worker, job.request, self._codec)
            if reply.is_late or not reply.is_killed:
                break
        return reply


def _ask(worker: Worker, request: object, codec: Codec) -> Reply:
    try:
        answer = worker.ask(codec.encode(request))
    except TimeoutError:
        return Reply(None, -signal.SIGKILL, is_late=True)
    return Reply(None, answer) if isinstance(answer, int) else Reply(codec.decode(answer))


def _abandon(job: _Job) -> None:
    if job.worker is not None:
        job.worker.kill()


def ask_once(module: str, request: object, timeout_s: float) -> Reply:
    """Start a worker for this request, wait for its reply and return it."""
    worker = Worker(module, timeout_s=timeout_s)
    try:
        return _ask(worker, request, JSON)
    finally:
        worker.end()
