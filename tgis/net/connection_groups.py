"""Groups connections that share a limit on their number, in the order of their arrival."""

import asyncio
from typing import Protocol

from tgis.net.http_routes import RouteLimits

MAX_BURST = 128  # simultaneous new connections allowed above a limit
PATIENCE_S = 1.0  # time for a request to arrive before another request may replace it
BURST_S = 0.05  # time for simultaneous new connections to send their requests


class Member(Protocol):
    """Connection in a group."""

    def leave_group(self) -> None: ...

    def end(self, is_graceful: bool) -> None:
        """End the connection, because there are too many."""

    def arrives_since(self) -> float | None:
        """Return the time at which the incomplete request began to arrive; None if there is none."""

    def give_way(self) -> None:
        """Refuse the incomplete request, so that another one gets its place."""


Group = dict[Member, None]


class ConnectionGroups:
    def __init__(self) -> None:
        self._groups: dict[tuple[int, bool], Group] = {}

    def find(self, limits: RouteLimits, is_idle: bool = False) -> Group:
        """Return the group of connections with these limits.

        If requests may be refused, idle connections have a separate group."""
        is_separate = is_idle and limits.refuse is not None
        return self._groups.setdefault((id(limits), is_separate), {})


def add_member(group: Group, member: Member, limits: RouteLimits, loop: asyncio.AbstractEventLoop) -> None:
    """Add a connection, and end the oldest ones if there are too many."""
    group[member] = None
    if len(group) == limits.max_connections + 1:
        loop.call_later(BURST_S, _trim_soon, loop, group, limits)
    elif len(group) > limits.max_connections + MAX_BURST:
        _trim(group, limits)


def has_room(group: Group, limits: RouteLimits, now: float) -> bool:
    """Return whether there is room for a request. If not, try to make room by refusing the oldest slow
    request."""
    if len(group) < limits.max_connections:
        return True
    for member in group:
        since = member.arrives_since()
        if since is not None and now - since > PATIENCE_S:
            member.give_way()
            return True
    return False


def _trim_soon(loop: asyncio.AbstractEventLoop, group: Group, limits: RouteLimits) -> None:
    """Trim the group after the loop has read the data that arrived in the meantime."""
    loop.call_soon(loop.call_soon, _trim, group, limits)


def _trim(group: Group, limits: RouteLimits) -> None:
    while len(group) > limits.max_connections:
        oldest = next(iter(group))
        oldest.leave_group()
        oldest.end(is_graceful=limits.refuse is not None)
