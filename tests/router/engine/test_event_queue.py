"""Checks event queues and the turns of their readers against plain lists."""

import asyncio
import random

from tgis.router.engine.live_request import MAX_WAKE_UPS_PER_TURN, EventQueue, WakeUps
from tgis.router.events import Ended, Event, Timings
from tgis.router.sequence import StopReason, TokenDetail

END = Ended(None, 0, StopReason.MAX_TOKENS, Timings(0, 0, 0))


async def read(queue: EventQueue, r: random.Random, lists: list[list[Event]]) -> None:
    """Read a queue, with random pauses between reads."""
    async for events in queue:
        lists.append(events)
        for _ in range(r.choice([0, 0, 1, 4])):
            await asyncio.sleep(0)


async def test_every_reader_gets_all_in_order() -> None:
    """Cancel some readers while they wait or before their first turn."""
    for seed in range(30):
        r, wake_ups = random.Random(seed), WakeUps()
        num_queues = r.choice([1, 3, MAX_WAKE_UPS_PER_TURN, 5 * MAX_WAKE_UPS_PER_TURN])
        queues = [EventQueue(wake_ups.wake) for _ in range(num_queues)]
        got: list[list[list[Event]]] = [[] for _ in queues]
        tasks = [asyncio.create_task(read(queue, r, lists)) for queue, lists in zip(queues, got, strict=True)]
        gone = {number for number in range(num_queues) if r.random() < 0.3}
        lengths = [r.randrange(12) for _ in queues]
        for step in range(12):
            for queue, length in zip(queues, lengths, strict=True):
                if step <= length:
                    queue.deliver(END if step == length else TokenDetail(step))
            if step == 5:
                for number in gone:
                    tasks[number].cancel()
            for _ in range(r.choice([0, 1, 3])):
                await asyncio.sleep(0)
        async with asyncio.timeout(20):
            await asyncio.gather(*tasks, return_exceptions=True)
        for number in set(range(num_queues)) - gone:
            assert all(got[number])
            tokens = [TokenDetail(step) for step in range(lengths[number])]
            assert [event for events in got[number] for event in events] == [*tokens, END]


async def test_readers_have_turns_in_order() -> None:
    """Wake MAX_WAKE_UPS_PER_TURN readers in each turn of the event loop until all are awake."""
    wake_ups, turn, woken = WakeUps(), 0, list[tuple[int, int]]()
    queues = [EventQueue(wake_ups.wake) for _ in range(3 * MAX_WAKE_UPS_PER_TURN + 1)]

    async def wait(number: int) -> None:
        await anext(queues[number])
        woken.append((turn, number))

    tasks = [asyncio.create_task(wait(number)) for number in range(len(queues))]
    await asyncio.sleep(0)
    for queue in queues:
        queue.deliver(TokenDetail(1))
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        turn += 1
    first = woken[0][0]
    assert woken == [(first + number // MAX_WAKE_UPS_PER_TURN, number) for number in range(len(queues))]


async def test_a_waiting_reader_gets_all_events_so_far() -> None:
    wake_ups = WakeUps()
    queues = [EventQueue(wake_ups.wake) for _ in range(MAX_WAKE_UPS_PER_TURN + 1)]
    readers = [asyncio.ensure_future(anext(queue)) for queue in queues]
    await asyncio.sleep(0)
    for number in (1, 2):
        for queue in queues:
            queue.deliver(TokenDetail(number))
        await asyncio.sleep(0)
    assert await readers[-1] == [TokenDetail(1), TokenDetail(2)]
