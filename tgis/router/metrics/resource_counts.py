"""What was taken and what was given back, each counted for itself, so that what never comes back is seen, and
what comes back twice."""

import asyncio
import logging
import os
import resource
from collections.abc import Mapping
from dataclasses import dataclass

logger = logging.getLogger(__name__)

SETTLE_S, LOOK_S = 1.0, 0.01  # how long calls that are ending get to give back what they hold


@dataclass(eq=False)
class Tally:
    """Of one kind of thing, ever."""

    created: int = 0
    released: int = 0

    @property
    def is_balanced(self) -> bool:
        return self.created == self.released


async def check_balance(tallies: Mapping[str, Tally]) -> None:
    """At the router's end: names in the log, by kind, what has no other half."""
    deadline = asyncio.get_running_loop().time() + SETTLE_S
    while not all(tally.is_balanced for tally in tallies.values()):
        if asyncio.get_running_loop().time() > deadline:
            break
        await asyncio.sleep(LOOK_S)
    for kind, tally in tallies.items():
        if not tally.is_balanced:
            logger.warning("leaked %s: %d created, %d released", kind, tally.created, tally.released)


def count_descriptors() -> int:
    """Open ones of this process. Counting takes one; where there is none left, all are open."""
    try:
        return len(os.listdir("/proc/self/fd")) - 1
    except OSError:
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
