"""Keeps the calls that are generating, so that clients can abort them by their request ids."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class AbortedError(Exception):
    """Raised in place of the cancellation of an aborted call."""


class LiveCalls:
    def __init__(self) -> None:
        self._tasks: dict[tuple[str, str], set[asyncio.Task[object]]] = {}
        self._aborted: set[asyncio.Task[object]] = set()

    @contextmanager
    def open(self, tenant: str, request_id: str) -> Iterator[None]:
        """Keep the current task's call under its id while the context is open. Several calls may have the
        same id, and an abort ends all of them. Raises AbortedError if the call is aborted."""
        task = asyncio.current_task()
        assert task is not None, "a call runs in a task"
        key = (tenant, request_id)
        self._tasks.setdefault(key, set()).add(task)
        try:
            yield
        except asyncio.CancelledError:
            if task not in self._aborted:
                raise
            task.uncancel()
            raise AbortedError from None
        finally:
            self._aborted.discard(task)
            self._tasks[key].discard(task)
            if not self._tasks[key]:
                del self._tasks[key]

    def abort(self, tenant: str, request_id: str) -> bool:
        """Abort a tenant's calls with this id. Return False if there is none."""
        tasks = self._tasks.get((tenant, request_id), set()) - self._aborted
        for task in tasks:
            self._aborted.add(task)
            task.cancel()
        return bool(tasks)
