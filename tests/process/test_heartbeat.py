"""Both ends of the heartbeat, over a real pipe, with a shorter period."""

import asyncio
import os
import time
from collections.abc import Callable

import pytest

from tgis.process import heartbeat
from tgis.process.heartbeat import Heartbeat, wait_until_hung

pytestmark = pytest.mark.usefixtures("steady_clock")

PERIOD_S, MAX_MISSED, MAX_MISSED_LOADING = 0.02, 10, 20
LONG_S = 60 * PERIOD_S  # longer than the allowed silence


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "PERIOD_S", PERIOD_S)
    monkeypatch.setattr(heartbeat, "MAX_MISSED", MAX_MISSED)
    monkeypatch.setattr(heartbeat, "MAX_MISSED_LOADING", MAX_MISSED_LOADING)


async def hangs(fd: int) -> bool:
    """Wait for a condition for a long time."""
    try:
        await asyncio.wait_for(wait_until_hung(fd, asyncio.Event(), asyncio.Event()), LONG_S)
    except TimeoutError:
        return False
    return True


def start_loaded(fd: int, is_excused: Callable[[], bool] = lambda: False) -> Heartbeat:
    beating = Heartbeat(fd)
    beating.finish_loading(is_excused)
    return beating


async def test_a_beating_process_is_not_hung() -> None:
    reader, writer = os.pipe()
    start_loaded(writer).begin_step(0)  # it may take any time
    assert not await hangs(reader)


async def test_short_steps_never_add_up() -> None:
    reader, writer = os.pipe()
    beating = start_loaded(writer)
    watch = asyncio.create_task(hangs(reader))
    while not watch.done():
        beating.begin_step(5 * PERIOD_S)
        await asyncio.sleep(2 * PERIOD_S)
        beating.end_step()
    assert not watch.result()


async def test_a_step_that_takes_too_long_hangs() -> None:
    reader, writer = os.pipe()
    beating, started = start_loaded(writer), time.perf_counter()
    beating.begin_step(10 * PERIOD_S)
    assert await hangs(reader)
    assert time.perf_counter() - started >= 10 * PERIOD_S


async def test_limited_waits_while_a_model_loads() -> None:
    """A wait for other ranks may last as long as its limit, although the heartbeats continue."""
    reader, writer = os.pipe()
    beating = Heartbeat(writer)
    for _ in range(2):
        with beating.limit_time(10 * PERIOD_S):
            await asyncio.sleep(PERIOD_S)
    assert not await hangs(reader)
    reader, writer = os.pipe()
    with Heartbeat(writer).limit_time(10 * PERIOD_S):
        assert await hangs(reader)


async def test_time_that_is_excused_does_not_count() -> None:
    reader, writer = os.pipe()
    start_loaded(writer, lambda: True).begin_step(2 * PERIOD_S)
    assert not await hangs(reader)


@pytest.mark.parametrize(
    ("last_sign", "is_loading"), [(b"", True), (b"-", True), (b".", False), (b"-.", False)]
)
async def test_a_silent_process_hangs_later_while_it_loads(
    last_sign: bytes, is_loading: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other state's limit is so high that only the limit of this state can end the wait."""
    reader, writer = os.pipe()
    os.write(writer, last_sign)
    monkeypatch.setattr(heartbeat, "MAX_MISSED" if is_loading else "MAX_MISSED_LOADING", 10**6)
    assert await hangs(reader)
    os.close(writer)


@pytest.mark.parametrize(("last_sign", "limit"), [(b"-", "MAX_MISSED_LOADING"), (b"-.", "MAX_MISSED")])
async def test_the_limit_is_that_of_the_state(
    last_sign: bytes, limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = os.pipe()
    os.write(writer, last_sign)
    monkeypatch.setattr(heartbeat, limit, 10**6)
    assert not await hangs(reader)
    os.close(writer)


async def test_a_process_that_loads_for_long_has_loaded_when_it_says_so() -> None:
    reader, writer = os.pipe()
    loaded = asyncio.Event()
    watch = asyncio.create_task(wait_until_hung(reader, loaded, asyncio.Event()))
    beating = Heartbeat(writer)
    await asyncio.sleep(LONG_S)
    assert not loaded.is_set()
    assert not watch.done()
    beating.finish_loading(lambda: False)
    await asyncio.wait_for(loaded.wait(), 20)
    watch.cancel()


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
