"""A router that keeps a kilobyte of every input on purpose, so that the test of growth is seen to find it.
Run like `python -m tgis`."""

from collections.abc import Iterator
from contextlib import contextmanager

from tgis.cli.main import main
from tgis.router.requests.concurrency import Permits

hold = Permits.hold
kept: list[bytearray] = []


@contextmanager
def hold_and_keep(permits: Permits, count: int) -> Iterator[None]:
    kept.extend(bytearray(1024) for _ in range(count))
    with hold(permits, count):
        yield


if __name__ == "__main__":
    Permits.hold = hold_and_keep  # type: ignore[method-assign]
    main()
