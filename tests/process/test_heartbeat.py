"""Both ends of the heartbeat, over a real pipe, with a shorter period."""

import asyncio
import os
import time

import pytest

from tgis.process import heartbeat
from tgis.process.heartbeat import Heartbeat, wait_until_hung

PERIOD_S, MAX_MISSED = 0.02, 5
LONG_S = 20 * PERIOD_S  # longer than the allowed silence


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "PERIOD_S", PERIOD_S)
    monkeypatch.setattr(heartbeat, "MAX_MISSED", MAX_MISSED)


async def hangs(fd: int) -> bool:
    """Wait for a condition for a long time."""
    try:
        await asyncio.wait_for(wait_until_hung(fd, asyncio.Event(), asyncio.Event()), LONG_S)
    except TimeoutError:
        return False
    return True


async def test_a_beating_process_is_not_hung() -> None:
    reader, writer = os.pipe()
    beating = Heartbeat(writer, is_excused=lambda: False)
    beating.begin_step(0)  # it may take any time
    assert not await hangs(reader)


async def test_short_steps_never_add_up() -> None:
    reader, writer = os.pipe()
    beating = Heartbeat(writer, is_excused=lambda: False)
    watch = asyncio.create_task(hangs(reader))
    while not watch.done():
        beating.begin_step(5 * PERIOD_S)
        await asyncio.sleep(2 * PERIOD_S)
        beating.end_step()
    assert not watch.result()


async def test_a_step_that_takes_too_long_hangs() -> None:
    reader, writer = os.pipe()
    beating, started = Heartbeat(writer, is_excused=lambda: False), time.monotonic()
    beating.begin_step(10 * PERIOD_S)
    assert await hangs(reader)
    assert time.monotonic() - started >= 10 * PERIOD_S


async def test_time_that_is_excused_does_not_count() -> None:
    reader, writer = os.pipe()
    Heartbeat(writer, is_excused=lambda: True).begin_step(2 * PERIOD_S)
    assert not await hangs(reader)


async def test_silence_counts_once_there_was_a_sign() -> None:
    reader, writer = os.pipe()
    silent = asyncio.create_task(hangs(os.dup(reader)))
    assert not await silent
    started = asyncio.create_task(hangs(reader))
    os.write(writer, b".")
    assert await started
    os.close(writer)


async def test_that_it_serves_is_known_with_the_heartbeat_that_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is noticed within the same period: a process that refuses its work afterwards has served."""
    monkeypatch.setattr(heartbeat, "PERIOD_S", 60.0)
    reader, writer = os.pipe()
    serving = asyncio.Event()
    watch = asyncio.create_task(wait_until_hung(reader, asyncio.Event(), serving))
    os.write(writer, b"+")
    await asyncio.wait_for(serving.wait(), 20)
    watch.cancel()
    os.close(writer)
