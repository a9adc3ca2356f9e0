"""Groups of connections that share a limit of their number, each in the order in which they came."""

import asyncio
from typing import Protocol

from tgis.net.http_routes import RouteLimits

MAX_BURST = 128  # connections that may come together beyond a limit
PATIENCE_S = 1.0  # time that a request may take to arrive before another one can get its place
BURST_S = 0.05  # time for connections that come together to send their requests


class Member(Protocol):
    """Connection in a group."""

    def leave_group(self) -> None: ...

    def end(self, is_graceful: bool) -> None:
        """End the connection, because there are too many."""

    def arrives_since(self) -> float | None:
        """Return when the request that arrives began to; None if there is none."""

    def give_way(self) -> None:
        """Refuse the request that arrives, so that another one gets its place."""


Group = dict[Member, None]


class ConnectionGroups:
    def __init__(self) -> None:
        self._groups: dict[tuple[int, bool], Group] = {}

    def find(self, limits: RouteLimits, is_idle: bool = False) -> Group:
        """Return the group of connections with these limits; of those whose requests may be refused, idle
        ones are apart."""
        is_apart = is_idle and limits.refuse is not None
        return self._groups.setdefault((id(limits), is_apart), {})


def add_member(group: Group, member: Member, limits: RouteLimits, loop: asyncio.AbstractEventLoop) -> None:
    """Add a connection, and end the oldest one of too many."""
    group[member] = None
    if len(group) == limits.max_connections + 1:
        loop.call_later(BURST_S, _trim_soon, loop, group, limits)
    elif len(group) > limits.max_connections + MAX_BURST:
        _trim(group, limits)


def has_room(group: Group, limits: RouteLimits, now: float) -> bool:
    """Return whether there is room for a request, if need be by ending the oldest one that arrives slowly."""
    if len(group) < limits.max_connections:
        return True
    for member in group:
        since = member.arrives_since()
        if since is not None and now - since > PATIENCE_S:
            member.give_way()
            return True
    return False


def _trim_soon(loop: asyncio.AbstractEventLoop, group: Group, limits: RouteLimits) -> None:
    """Trim once the loop has read what has come meanwhile, however busy it was."""
    loop.call_soon(loop.call_soon, _trim, group, limits)


def _trim(group: Group, limits: RouteLimits) -> None:
    while len(group) > limits.max_connections:
        oldest = next(iter(group))
        oldest.leave_group()
        oldest.end(is_graceful=limits.refuse is not None)
