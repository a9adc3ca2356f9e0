"""Logs the progress of a download."""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)

INTERVAL_S = 10.0


@contextmanager
def logged_progress(name: str, num_bytes: int, received: Callable[[], int]) -> Iterator[None]:
    """Log the number of received bytes every few seconds while the block runs."""
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(INTERVAL_S):
            logger.info("%s: received %.1f of %.1f MB", name, received() / 1e6, num_bytes / 1e6)

    thread = threading.Thread(target=watch, name="download progress")
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
