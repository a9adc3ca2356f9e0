"""Ends calls whose client does not read. Without a deadline, they would hold their resources for ever."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any

import grpc

from tgis.router.api.grpc.grpc_internals import reset_calls
from tgis.router.errors import SlowClientError

CHECKS_PER_TIMEOUT = 10  # so that a slow client is detected at most a tenth of the timeout late

Context = grpc.aio.ServicerContext[Any, Any]
Task = asyncio.Task[Any]


class SlowClients:
    """Watcher of calls whose answer waits for the client. After `timeout_s`, a stream ends with
    SlowClientError. Its last message or status gets the same time again, and then the call is reset."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._since: dict[Task, float] = {}
        """Times since when answers have been waiting for their clients."""
        self._late: set[Task] = set()
        self._ending: set[Task] = set()

    async def send(self, responses: AsyncGenerator[Any, None], context: Context) -> None:
        """Write all responses. Throw SlowClientError into `responses` if the client does not read."""
        task = self._current_task()
        has_begun = False
        async for response in responses:
            self._since[task] = time.monotonic()
            try:
                if not has_begun:  # sent separately, because no status can follow while it waits
                    await context.send_initial_metadata(())
                    has_begun = True
                await context.write(response)
            except grpc.aio.InternalError:  # the client is gone, which gRPC may report only now
                raise asyncio.CancelledError from None
            except asyncio.CancelledError:
                if task not in self._late or task.uncancel():
                    raise
                if has_begun:
                    await responses.athrow(SlowClientError())
                with suppress(SlowClientError):
                    await responses.athrow(SlowClientError())
                reset_calls({task})
                raise
            del self._since[task]

    def end(self) -> None:
        """Record that the current call has only its last message or its status left to send."""
        task = self._current_task()
        self._since[task] = time.monotonic()
        self._ending.add(task)

    def _current_task(self) -> Task:
        task = asyncio.current_task()
        assert task is not None, "calls run in tasks"
        task.add_done_callback(self._forget)
        return task

    async def watch(self) -> None:
        while True:
            await asyncio.sleep(self._timeout_s / CHECKS_PER_TIMEOUT)
            self._check(time.monotonic() - self._timeout_s)

    def _check(self, begun_before: float) -> None:
        overdue = {task for task, begun in self._since.items() if begun <= begun_before}
        reset_calls(overdue & self._ending)
        for task in overdue - self._ending - self._late:
            self._late.add(task)
            task.cancel()

    def _forget(self, task: Task) -> None:
        self._since.pop(task, None)
        self._late.discard(task)
        self._ending.discard(task)
