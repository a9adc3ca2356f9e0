"""Keeps the calls that are generating, so that clients can abort them by their request ids."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")


class AbortedError(Exception):
    """Raised at the end of an aborted call's responses."""


class LiveCalls:
    def __init__(self) -> None:
        self._tasks: dict[tuple[str, str], set[asyncio.Task[None]]] = {}
        self._aborted: set[asyncio.Task[None]] = set()

    async def run(
        self, tenant: str, request_id: str, responses: AsyncGenerator[T, None]
    ) -> AsyncGenerator[T, None]:
        """Yield a call's responses until an abort ends them, which raises AbortedError.

        Several calls may have the same id, and an abort ends all of them. Another task makes the responses,
        because a call whose own task is cancelled gets no status."""
        queue: asyncio.Queue[T | Exception | None] = asyncio.Queue()
        task = asyncio.create_task(_make(responses, queue))
        key = (tenant, request_id)
        self._tasks.setdefault(key, set()).add(task)
        try:
            while (item := await queue.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield item
                queue.task_done()
            if task in self._aborted:
                raise AbortedError
        finally:
            self._aborted.discard(task)
            self._tasks[key].discard(task)
            if not self._tasks[key]:
                del self._tasks[key]
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def abort(self, tenant: str, request_id: str) -> bool:
        """Abort a tenant's calls with this id. Return False if there is none."""
        tasks = self._tasks.get((tenant, request_id), set()) - self._aborted
        for task in tasks:
            self._aborted.add(task)
            task.cancel()
        return bool(tasks)


async def _make(responses: AsyncGenerator[T, None], queue: asyncio.Queue[T | Exception | None]) -> None:
    """Put the responses and then None or an error into the queue. The next response is made once the last one
    is sent, so that further tokens are joined while a client is slow."""
    try:
        async with aclosing(responses):
            async for response in responses:
                queue.put_nowait(response)
                await queue.join()
    except Exception as error:
        queue.put_nowait(error)
    finally:
        queue.put_nowait(None)
