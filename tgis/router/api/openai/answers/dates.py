"""Makes the dates of answers."""

import time


def unix_time() -> int:
    """Return the whole seconds since 1970-01-01 UTC."""
    return int(time.time())
