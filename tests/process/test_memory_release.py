"""Memory of large calls is returned to the system, measured by this process's resident memory."""

import asyncio
import contextlib
import gc
import time
from collections.abc import Iterator

import psutil
import pytest

from tests.support.lacks import no_thread_left
from tgis.process.memory import release as memory_release
from tgis.process.memory.release import ENOUGH_BYTES, LARGE_BYTES, MemoryRelease

SMALL, NUM_SMALL = 600, 200_000  # too large for Python's own allocator
HELD = SMALL * NUM_SMALL * 3 // 4


class Node:
    """Object that refers to itself, so that only the collector frees it."""

    def __init__(self, content: list[bytes]) -> None:
        self.content, self.itself = content, self


@pytest.fixture(autouse=True)
def _no_collector_and_no_delays(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(memory_release, "DELAYS_S", (0.01, 0.01))
    gc.disable()
    yield
    gc.enable()
    gc.collect()


def resident() -> int:
    return psutil.Process().memory_info().rss


async def released_by(*messages: int, wait_s: float) -> int:
    """Return the bytes returned to the system after calls with messages of these sizes; wait for the
    maximum."""
    content = [bytes(SMALL) for _ in range(NUM_SMALL)]
    Node(content)
    last = bytes(SMALL)  # on top of the heap, where it keeps the heap from shrinking
    del content
    before, memory = resident(), MemoryRelease()
    watching = asyncio.create_task(memory.watch())
    for num_bytes in messages:
        memory.count(num_bytes)
    deadline = time.monotonic() + wait_s
    while before - resident() < HELD and time.monotonic() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    watching.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await watching
    assert len(last) == SMALL
    return before - resident()


@pytest.mark.parametrize(
    "messages", [(ENOUGH_BYTES,), pytest.param((ENOUGH_BYTES // 4,) * 4, marks=pytest.mark.slow)]
)
async def test_enough_large_calls_give_memory_back(messages: tuple[int, ...]) -> None:
    assert await released_by(*messages, wait_s=20) >= HELD


@pytest.mark.parametrize(
    "messages",
    [(), (LARGE_BYTES,) * 1000, pytest.param((ENOUGH_BYTES // 4,) * 3, marks=pytest.mark.slow)],
)
async def test_nothing_is_looked_for_after_others(messages: tuple[int, ...]) -> None:
    assert await released_by(*messages, wait_s=0.2) < HELD


async def test_memory_is_released_after_a_lack_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    released = asyncio.Event()
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(
        memory_release, "return_freed_memory", lambda: loop.call_soon_threadsafe(released.set)
    )
    memory = MemoryRelease()
    watching = asyncio.create_task(memory.watch())
    with no_thread_left():
        memory.count(ENOUGH_BYTES)
        await asyncio.sleep(0.1)
    memory.count(ENOUGH_BYTES)
    async with asyncio.timeout(10):
        await released.wait()
    watching.cancel()
