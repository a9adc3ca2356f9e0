"""Reads when the client of a call stops waiting."""

import time

from tgis.router.api.grpc.call_status import Context


def deadline_of(context: Context) -> float | None:
    """Return the call's deadline on the monotonic clock, or None if the client set none."""
    remaining_s = context.time_remaining()
    return None if remaining_s is None else time.monotonic() + remaining_s
