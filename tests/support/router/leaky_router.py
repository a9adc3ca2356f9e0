"""Router that deliberately leaks some of every resource in its first calls, to prove that the leak tests
detect it. Run it like `python -m tgis`."""

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager

from tgis.cli.main import main
from tgis.router.engine.claims import ConcurrencyLimit
from tgis.router.engine.engine import Engine
from tgis.router.engine.live_request import LiveRequest
from tgis.router.scheduling.block_pool import BlockPool
from tgis.router.scheduling.free_rows import FreeRows

acquire, release_blocks, close_row, release = (
    ConcurrencyLimit.acquire,
    BlockPool.release,
    FreeRows.close,
    Engine._release,
)
left = {"block": 1, "row": 1, "permit": 1}
tasks: list[asyncio.Task[None]] = []
forgotten: list[LiveRequest] = []


def leaks(kind: str) -> bool:
    left[kind] -= 1
    return left[kind] >= 0


@contextmanager
def acquire_and_release_twice(limit: ConcurrencyLimit, count: int, is_again: bool = False) -> Iterator[None]:
    if leaks("permit"):
        tasks.append(asyncio.create_task(asyncio.sleep(3600)))
        os.dup(0)
        limit.num_free += count
        limit.resource_count.released += count
    with acquire(limit, count, is_again):
        yield


def release_all_but_one(pool: BlockPool, blocks: list[int]) -> None:
    release_blocks(pool, blocks[1:] if blocks and leaks("block") else blocks)


def close_later(rows: FreeRows, row: int) -> None:
    if not leaks("row"):
        close_row(rows, row)


def forget_the_first(engine: Engine, live: LiveRequest) -> None:
    """Never release the first request, not even when its client disconnects."""
    if not forgotten:
        forgotten.append(live)
    if live not in forgotten:
        release(engine, live)


if __name__ == "__main__":
    ConcurrencyLimit.acquire = acquire_and_release_twice  # type: ignore[method-assign]
    BlockPool.release = release_all_but_one  # type: ignore[method-assign]
    FreeRows.close = close_later  # type: ignore[method-assign]
    Engine._release = forget_the_first  # type: ignore[method-assign]
    main()
