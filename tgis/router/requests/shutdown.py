"""Explains how calls end when the service stops before they are finished."""

import asyncio
from collections.abc import Callable

from tgis.router.errors import UnavailableError

CauseOf = Callable[[BaseException | None], BaseException | None]
"""Function that returns why a call ended that raised an exception."""
STOPPED = "the service stopped before the call was finished"


class Shutdown:
    """The service's end, which cancels the calls that a drain has not finished."""

    def __init__(self) -> None:
        self.cancels_calls = False
        """True once the service, and not only a client, cancels calls."""

    def cause_of(self, error: BaseException | None) -> BaseException | None:
        """Return why a call ended: `error`, or the service's end if that has cancelled the call."""
        is_cancelled = isinstance(error, asyncio.CancelledError | GeneratorExit)
        return UnavailableError(STOPPED) if is_cancelled and self.cancels_calls else error
