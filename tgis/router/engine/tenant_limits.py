"""Limits the requests of each tenant at once, and its requests and tokens per minute."""

import math
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tgis.router.engine.handle import NO_LIMITS, TenantLimits
from tgis.router.engine.live_request import LiveRequest
from tgis.router.errors import TenantLimitError

MIN_PRUNED = 256  # tenants below which none is forgotten


class Allowance:
    """Token bucket that holds what is allowed in a minute, full at first. Its level may become negative,
    because the use is known only afterwards; it is refilled first."""

    def __init__(self, per_minute: int, now: float) -> None:
        self._per_minute = per_minute
        self._level = float(per_minute)
        self._updated_at = now

    def wait_s(self, amount: int, now: float) -> float:
        """Return the seconds until `amount` may be used, 0 if it may be used now. More than the amount of a
        minute may be used when the bucket is full."""
        self._refill(now)
        missing = min(amount, self._per_minute) - self._level
        return max(missing, 0.0) * 60 / self._per_minute

    def use(self, amount: int) -> None:
        self._level -= amount

    def is_full(self, now: float) -> bool:
        self._refill(now)
        return self._level == self._per_minute

    def _refill(self, now: float) -> None:
        added = (now - self._updated_at) * self._per_minute / 60
        self._level = min(self._level + added, float(self._per_minute))
        self._updated_at = now


@dataclass
class TenantUse:
    """Use of the service by one tenant."""

    limits: TenantLimits = NO_LIMITS
    requests: Allowance | None = None
    tokens: Allowance | None = None
    num_current: int = 0
    """Number of requests in unreleased calls."""
    live: dict[LiveRequest, int] = field(default_factory=dict)
    """Sequences of unreleased calls, with the number of their tokens that have been counted."""

    def set_limits(self, limits: TenantLimits, now: float) -> None:
        """Set the limits of a new tenant, or changed ones. What is allowed in a minute begins anew."""
        self.limits = limits
        self.requests, self.tokens = (
            None if per_minute is None else Allowance(per_minute, now)
            for per_minute in (limits.requests_per_minute, limits.tokens_per_minute)
        )

    def check(self, count: int, now: float) -> None:
        """Check that the tenant may send `count` requests now. Raises TenantLimitError."""
        limits = self.limits
        if self.num_current + count > (limits.concurrent_requests or math.inf):
            text = f"more than {limits.concurrent_requests} requests of the tenant at once"
            raise TenantLimitError(text, TenantLimitError.retry_s)
        if self.requests is not None and (wait_s := self.requests.wait_s(count, now)):
            text = f"more than {limits.requests_per_minute} requests of the tenant in a minute"
            raise TenantLimitError(text, math.ceil(wait_s))
        self._count_tokens(self.live)
        if self.tokens is not None and (wait_s := self.tokens.wait_s(1, now)):
            text = f"more than {limits.tokens_per_minute} tokens of the tenant in a minute"
            raise TenantLimitError(text, math.ceil(wait_s))

    @contextmanager
    def call(self, count: int) -> Iterator[None]:
        """Count the requests of a call, which are current while the context is open."""
        if self.requests is not None:
            self.requests.use(count)
        self.num_current += count
        try:
            yield
        finally:
            self.num_current -= count

    def begin(self, live: LiveRequest) -> None:
        self.live[live] = 0

    def end(self, ended: Collection[LiveRequest]) -> None:
        """Count the last tokens of a released call."""
        self._count_tokens(ended)
        for live in ended:
            del self.live[live]

    def is_forgettable(self, now: float) -> bool:
        """Return True if a new tenant would have the same allowances."""
        allowances = [each for each in (self.requests, self.tokens) if each is not None]
        return not self.num_current and all(each.is_full(now) for each in allowances)

    def _count_tokens(self, counted: Iterable[LiveRequest]) -> None:
        """Count the tokens since the last count. A sequence without a step has used none."""
        if self.tokens is None:
            return
        for live in counted:
            if live.times.started_at is not None:
                num_tokens = live.sequence.num_input_tokens + live.sequence.num_generated
                self.tokens.use(num_tokens - self.live[live])
                self.live[live] = num_tokens


class TenantLimiter:
    """Use of all tenants that have a limit."""

    def __init__(self) -> None:
        self._uses: dict[str, TenantUse] = {}
        self._max_uses = MIN_PRUNED

    def check(self, limits: TenantLimits, count: int) -> TenantUse:
        """Return the use of a tenant that sends `count` requests. Raises TenantLimitError."""
        now = time.monotonic()
        use = self._uses.get(limits.tenant)
        if use is None:
            self._forget_unused(now)
            use = self._uses[limits.tenant] = TenantUse()
        if use.limits != limits:
            use.set_limits(limits, now)
        use.check(count, now)
        return use

    def _forget_unused(self, now: float) -> None:
        if len(self._uses) >= self._max_uses:
            self._uses = {name: use for name, use in self._uses.items() if not use.is_forgettable(now)}
            self._max_uses = max(2 * len(self._uses), MIN_PRUNED)
