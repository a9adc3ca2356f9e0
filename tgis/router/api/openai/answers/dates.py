"""Dates of answers."""

import time


def unix_time() -> int:
    """Return the whole seconds since 1970, in UTC."""
    return int(time.time())
