"""Limits the time and number of connections. Connections that share a limit on their number are a group, in
the order of their arrival."""

import asyncio
import math
from dataclasses import dataclass
from http import HTTPStatus
from typing import Protocol

from tgis.net.http.routes import PROBE_LIMITS, RouteLimits

MAX_BURST = 128  # simultaneous new connections allowed above a limit
PATIENCE_S = 1.0  # time for a request to arrive before another request may replace it
BURST_S = 0.05  # time for simultaneous new connections to send their requests


@dataclass(frozen=True)
class ConnectionOptions:
    """Limits of a port's connections that do not depend on routes."""

    fresh: RouteLimits = PROBE_LIMITS
    """Limits of connections without a complete request."""
    slow_reader_s: float = 60.0
    keepalive_s: float = 60.0
    max_age_s: float | None = None
    """Age after which a connection ends with its next response; None: never."""


class LimitedConnection(Protocol):
    """Connection as its limits see it."""

    @property
    def is_arriving(self) -> bool:
        """True if the current request is incomplete."""

    @property
    def num_received(self) -> int:
        """Bytes of the current request that have arrived."""

    def abort(self) -> None: ...

    def close(self) -> None:
        """Close once the client has read what was written."""

    def refuse(self, status: HTTPStatus) -> None:
        """Answer the current request with an error, and close."""

    def give_up(self) -> None:
        """End the request of a client that does not read, and the connection."""


Group = dict["ConnectionLimits", None]


class ConnectionGroups:
    def __init__(self) -> None:
        self._groups: dict[tuple[int, bool], Group] = {}

    def find(self, limits: RouteLimits, is_idle: bool = False) -> Group:
        """Return the group of connections with these limits.

        If requests may be refused, idle connections have a separate group."""
        is_separate = is_idle and limits.refuse is not None
        return self._groups.setdefault((id(limits), is_separate), {})


def add_member(
    group: Group, member: "ConnectionLimits", limits: RouteLimits, loop: asyncio.AbstractEventLoop
) -> None:
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


class ConnectionLimits:
    """Group and deadlines of one connection."""

    def __init__(
        self,
        connection: LimitedConnection,
        groups: ConnectionGroups,
        options: ConnectionOptions,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._connection = connection
        self._groups = groups
        self._options = options
        self._loop = loop
        self._group: Group | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._deadline: float | None = None
        self._slow_timer: asyncio.TimerHandle | None = None
        self._began_at: float | None = loop.time()
        """Time of the first byte of the current request; None: the connection is idle."""
        self._old_at = math.inf if options.max_age_s is None else loop.time() + options.max_age_s
        self.route = options.fresh
        """Limits of the current request."""
        self.enter(options.fresh)
        self.reschedule()

    @property
    def is_old(self) -> bool:
        """True if the connection should end with its next response."""
        return self._loop.time() >= self._old_at

    def close(self) -> None:
        self.leave_group()
        self._began_at = None
        self.reschedule()
        self.stop_slow_timer()

    # Requests.

    def receive(self) -> None:
        """Begin a request unless one is arriving."""
        if self._began_at is None:
            self._began_at = self._loop.time()

    def begin(self) -> None:
        """Begin a request whose first bytes arrived during the previous one."""
        self._began_at = self._loop.time()

    def admit(self, limits: RouteLimits) -> bool:
        """Enter the group of a request's route. Return False if the request is to be refused."""
        group = self._groups.find(limits)
        is_admitted = limits.refuse is None or has_room(group, limits, self._loop.time())
        self.enter(limits if is_admitted else self._options.fresh)
        return is_admitted

    def linger(self) -> None:
        """End the current request; the connection closes soon."""
        self._began_at = None

    def become_idle(self) -> None:
        self._began_at = None
        self.enter(self.route if self.route.refuse is not None else self._options.fresh, is_idle=True)

    def reschedule(self) -> None:
        """Update the deadline of the current request."""
        deadline = self._next_deadline()
        if deadline == self._deadline:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._deadline = deadline
        self._timer = None if deadline is None else self._loop.call_at(deadline, self._connection.abort)

    def _next_deadline(self) -> float | None:
        if self._began_at is None:
            return None
        connection = self._connection
        arrival_s = self.route.arrival_s(connection.num_received) if connection.is_arriving else None
        spans = (self.route.answer_s, arrival_s)
        return min((self._began_at + span for span in spans if span is not None), default=None)

    # Groups.

    def enter(self, limits: RouteLimits, is_idle: bool = False) -> None:
        """Move the connection to the group of these limits."""
        group = self._groups.find(limits, is_idle)
        self.route = limits
        if group is not self._group:
            self.leave_group()
            self._group = group
            add_member(group, self, limits, self._loop)

    def leave_group(self) -> None:
        if self._group is not None:
            self._group.pop(self, None)
            self._group = None

    def end(self, is_graceful: bool) -> None:
        """End the connection, because there are too many."""
        self._connection.close() if is_graceful else self._connection.abort()

    def arrives_since(self) -> float | None:
        """Return the time at which the incomplete request began to arrive; None if there is none."""
        return self._began_at if self._connection.is_arriving else None

    def give_way(self) -> None:
        """Refuse the incomplete request, so that another one gets its place."""
        self.enter(self._options.fresh)
        self._connection.refuse(HTTPStatus.REQUEST_TIMEOUT)
        self.reschedule()

    # Clients that do not read.

    def start_slow_timer(self) -> None:
        if self._slow_timer is None:
            self._slow_timer = self._loop.call_later(self._options.slow_reader_s, self._connection.give_up)

    def stop_slow_timer(self) -> None:
        if self._slow_timer is not None:
            self._slow_timer.cancel()
            self._slow_timer = None
