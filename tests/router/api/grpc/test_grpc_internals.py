"""Private parts of grpc.aio that `grpc_internals.py` uses. `test_slow_clients.py` shows what they are for."""

import asyncio
import logging
from importlib.metadata import version

import grpc

from tgis.router.api.grpc import grpc_internals
from tgis.router.api.grpc.grpc_internals import find_waiters, reset_calls

MOVED = (
    f"grpcio {version('grpcio')} differs from the version that tgis/router/api/grpc/grpc_internals.py names"
)


async def test_one_task_waits_for_the_end_of_each_call() -> None:
    tasks: list[asyncio.Task[None]] = []
    have_begun = asyncio.Barrier(3)

    async def wait(request: bytes, context: object) -> bytes:
        task = asyncio.current_task()
        assert task is not None, MOVED
        tasks.append(task)
        await have_begun.wait()
        await asyncio.Event().wait()
        return request

    server = grpc.aio.server()
    methods = {"wait": grpc.unary_unary_rpc_method_handler(wait)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("service", methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        calls = [channel.unary_unary("/service/wait")(b"") for _ in range(2)]
        async with asyncio.timeout(10):
            await have_begun.wait()
        names = sorted({getattr(task.get_coro(), "__name__", "") for task in asyncio.all_tasks()})
        waiters = [find_waiters({task}) for task in tasks]
        assert [len(each) for each in waiters] == [1, 1], f"{MOVED}: the server's coroutines are {names}"
        assert waiters[0] != waiters[1], MOVED
        reset_calls({tasks[0]})
        await asyncio.wait({tasks[0], *waiters[0]}, timeout=10)
        assert tasks[0].done(), MOVED
        assert waiters[0][0].done(), MOVED
        assert not any(each.done() for each in (tasks[1], *waiters[1])), MOVED
        for call in calls:
            call.cancel()
    await server.stop(None)


def test_the_logger_of_unsent_answers_exists() -> None:
    assert grpc_internals.LOGGER in logging.getLogger().manager.loggerDict, MOVED
