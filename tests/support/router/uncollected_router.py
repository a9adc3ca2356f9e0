"""Router without the garbage collector: objects in reference cycles at the end of a call stay and are
counted. On SIGUSR2 it prints a line with their number. Run it like `python -m tgis`."""

import gc
import signal
from collections import Counter

from tgis.cli.main import main
from tgis.router.requests.request_log import CallLog


def print_remaining_objects(*_: object) -> None:
    """Print the numbers of objects created since the start that still exist: call logs, which refer to their
    messages, and exceptions, which refer to frames."""
    kept = (each for each in gc.get_objects() if isinstance(each, CallLog | BaseException))
    print(f"left: {sorted(Counter(type(each).__name__ for each in kept).items())}", flush=True)


def collect_nothing(generation: int = 2) -> int:
    return 0


if __name__ == "__main__":
    gc.disable()
    gc.collect = collect_nothing
    signal.signal(signal.SIGUSR2, print_remaining_objects)
    main()
