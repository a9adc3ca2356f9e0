"""Counts taken and released resources separately, to detect leaks and double releases."""

import asyncio
import logging
import os
import resource
from collections.abc import Mapping
from dataclasses import dataclass

logger = logging.getLogger(__name__)

SETTLE_S = 1.0  # time for ending calls to release their resources
CHECK_INTERVAL_S = 0.01


@dataclass(eq=False)
class ResourceCount:
    """Counts of one kind of resource since the start."""

    created: int = 0
    released: int = 0

    @property
    def is_balanced(self) -> bool:
        return self.created == self.released


async def check_balance(resource_counts: Mapping[str, ResourceCount]) -> None:
    """Log every kind of resource whose counts differ at shutdown, after a time to settle."""
    deadline = asyncio.get_running_loop().time() + SETTLE_S
    while not all(count.is_balanced for count in resource_counts.values()):
        if asyncio.get_running_loop().time() > deadline:
            break
        await asyncio.sleep(CHECK_INTERVAL_S)
    for kind, count in resource_counts.items():
        if not count.is_balanced:
            logger.warning("leaked %s: %d created, %d released", kind, count.created, count.released)


def count_descriptors() -> int:
    """Return the number of open file descriptors, or the limit if none is free, because counting needs
    one."""
    try:
        return len(os.listdir("/proc/self/fd")) - 1
    except OSError:
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
