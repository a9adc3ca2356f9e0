"""Advice to the system about areas of memory, from threads in the background.

While the system acts on it, other threads of the process wait when they map memory, and a killed process does
not end. Therefore a call is about a few MiB, and the thread has the usual priority: a busy system suspends
threads of the lowest priority in the middle of a call, for up to seconds. Instead, the thread sleeps after
each call."""

import ctypes
import time
from collections.abc import Callable

MADV_HUGEPAGE = 14  # Linux's constants; Python has no names for the later ones
MADV_POPULATE_WRITE = 23  # Linux 5.14
MADV_COLLAPSE = 25  # Linux 6.1
_PAUSE = 9  # times the duration of a call: the thread uses at most a tenth of a core

_madvise: Callable[..., int] | None = getattr(ctypes.CDLL(None), "madvise", None)


def advise(begin: int, num_bytes: int, advice: int) -> bool:
    """Return False if the system refuses, or has no `madvise`."""
    if _madvise is None:
        return False
    return not _madvise(ctypes.c_void_p(begin), ctypes.c_size_t(num_bytes), advice)


def advise_slowly(begin: int, num_bytes: int, advice: int) -> bool:
    """`advise`, and then sleep."""
    began = time.monotonic()
    is_accepted = advise(begin, num_bytes, advice)
    time.sleep(_PAUSE * (time.monotonic() - began))
    return is_accepted
