"""Sets the groups in which events arrive at an API."""

import random
from collections.abc import AsyncIterator, Callable
from itertools import pairwise
from typing import Any

from tests.support.router.engine_pair import each_of
from tests.support.router.served_grpc import RecordingHandle
from tgis.router.engine.handle import SequenceId
from tgis.router.events import Event

Split = Callable[[list[Event]], list[list[Event]]]


def one_by_one(events: list[Event]) -> list[list[Event]]:
    return [[event] for event in events]


def all_at_once(events: list[Event]) -> list[list[Event]]:
    return [events]


def at_random(r: random.Random) -> Split:
    def split(events: list[Event]) -> list[list[Event]]:
        share = r.choice([0.1, 0.3, 0.7])
        cuts = [0, *(place for place in range(1, len(events)) if r.random() < share), len(events)]
        return [events[begin:end] for begin, end in pairwise(cuts)]

    return split


def ending_with(final: Event, number: int, split: Split) -> Split:
    """Split the first `number` events, followed by another final event."""
    return lambda events: split([*events[:number], final])


def group_events(handle: RecordingHandle, split: Split) -> None:
    """Make the events of all later sequences arrive in the groups of `split`."""
    engine = handle._handle

    async def events(sequence_id: SequenceId) -> AsyncIterator[list[Event]]:
        for group in split([event async for event in each_of(engine.events(sequence_id))]):
            yield group

    replaced: Any = handle
    replaced.events = events
