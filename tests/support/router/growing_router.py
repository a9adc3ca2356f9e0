"""Router that deliberately keeps a kilobyte of every input, to prove that the growth test detects it. Run it
like `python -m tgis`."""

from collections.abc import Iterator
from contextlib import contextmanager

from tgis.cli.main import main
from tgis.router.engine.claims import ConcurrencyLimit

acquire = ConcurrencyLimit.acquire
kept: list[bytearray] = []


@contextmanager
def acquire_and_keep(limit: ConcurrencyLimit, count: int, is_again: bool = False) -> Iterator[None]:
    kept.extend(bytearray(1024) for _ in range(count))
    with acquire(limit, count, is_again):
        yield


if __name__ == "__main__":
    ConcurrencyLimit.acquire = acquire_and_keep  # type: ignore[method-assign]
    main()
