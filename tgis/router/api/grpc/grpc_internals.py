"""Private parts of grpc.aio. No other file may use them.

Checked with grpcio 1.85.1. It has no public way to reset a call whose client does not read, and reports an
answer that was not sent only in a log. In use:

- the task that waits for the end of a call: its coroutine's name, and the call's task among its locals;
- the logger of unsent answers: its name.

If a version changes these, calls of clients that do not read last until their connection ends, and unsent
answers are logged with tracebacks. tests/router/api/grpc/test_grpc_internals.py says what has changed."""

import asyncio
import gc
from collections.abc import Set
from typing import Any

LOGGER = "grpc._cython.cygrpc"
END_WAITER = "_schedule_rpc_coro"  # coroutine that waits for the end of every call


def reset_calls(tasks: Set[asyncio.Task[Any]]) -> None:
    """Reset calls by cancelling the tasks that refer to them.

    gRPC's core resets a call without references. The call's own task and one other task refer to it, and the
    server refers to the newest call until the next one."""
    if not tasks:
        return
    for waiter in find_waiters(tasks):
        waiter.cancel()
    for task in tasks:
        task.cancel()


def find_waiters(tasks: Set[asyncio.Task[Any]]) -> list[asyncio.Task[Any]]:
    """Return the tasks that wait for the end of the calls which `tasks` serve."""
    return [each for each in asyncio.all_tasks() if _waits_for(each.get_coro(), tasks)]


def _waits_for(coroutine: object, tasks: Set[asyncio.Task[Any]]) -> bool:
    if getattr(coroutine, "__name__", "") != END_WAITER:
        return False
    # A compiled coroutine keeps its locals in an object that it refers to.
    inner = gc.get_referents(*gc.get_referents(coroutine))
    return any(isinstance(each, asyncio.Task) and each in tasks for each in inner)
