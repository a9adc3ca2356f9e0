"""Reports which blocks of the prefix cache can be found, to listeners outside of the engine."""

import asyncio
from collections.abc import Callable, Hashable
from typing import NamedTuple

from tgis.router.scheduling.block_pool import BlockPool, Edge
from tgis.router.scheduling.prefix_cache import tenant_of_root
from tgis.router.scheduling.snapshot_blocks import SnapshotBlocks


class StoredBlock(NamedTuple):
    """Full block of decoder tokens that sequences of its tenant can find."""

    name: int
    """Number that no other block of the same pool gets."""
    parent: int | None
    """Name of the block before it, or None for the first block of a prompt."""
    token_ids: tuple[int, ...]
    tenant: str


class CacheChanges(NamedTuple):
    """Changes since the last report. They apply in the order of the fields."""

    is_cleared: bool
    """True if all earlier blocks are gone."""
    stored: tuple[StoredBlock, ...]
    """Stored blocks; parents come before their children."""
    removed: tuple[int, ...]
    """Names of removed blocks."""


CacheListener = Callable[[CacheChanges], None]


class CacheRecorder:
    """Records the changes of a pool while there are listeners, and reports them once in each turn of the
    event loop. Blocks of prompts with a salt or an adapter are not reported. If the model keeps a state,
    neither are blocks after the last snapshot."""

    def __init__(self, pool: Callable[[], BlockPool]) -> None:
        """`pool` returns the current pool, which passes its listener on when it is renewed."""
        self._pool = pool
        self._listeners: set[CacheListener] = set()
        self._blocks: dict[int, StoredBlock] = {}
        self._is_cleared = self._is_due = False
        self._stored: list[StoredBlock] = []
        self._removed: dict[int, None] = {}

    def add(self, listener: CacheListener) -> None:
        """Report all blocks to a listener now, and changes from now on."""
        if not self._listeners:
            self._attach()
        self._flush()
        self._listeners.add(listener)
        listener(CacheChanges(True, tuple(self._blocks.values()), ()))

    def discard(self, listener: CacheListener) -> None:
        self._listeners.discard(listener)
        if not self._listeners:
            self._detach()
            self._blocks.clear()

    def store(self, name: int, edge: Edge) -> None:
        prefix, token_ids = edge
        parent = self._blocks.get(prefix) if isinstance(prefix, int) else None
        tenant = parent.tenant if parent is not None else _tenant_of(prefix)
        # The parent of a running sequence's block may be gone. No other sequence can find such a block.
        if tenant is None or len(token_ids) < self._pool().block_size:
            return
        block = StoredBlock(name, None if parent is None else parent.name, token_ids, tenant)
        self._blocks[name] = block
        # A block before a new snapshot may have been removed with an old one since the last report.
        if self._removed.pop(name, self) is self:
            self._stored.append(block)
        self._flush_soon()

    def remove(self, name: int) -> None:
        if self._blocks.pop(name, None) is not None:
            self._removed[name] = None
            self._flush_soon()

    def clear(self) -> None:
        self._blocks.clear()
        self._stored.clear()
        self._removed.clear()
        self._is_cleared = True
        self._flush_soon()

    def _attach(self) -> None:
        pool = self._pool()
        snapshots = None if pool.states is None else SnapshotBlocks(self)
        listener = snapshots or self
        for name, edge in sorted(pool.published(), key=lambda each: each[0]):
            listener.store(name, edge)
        if pool.states is not None and snapshots is not None:
            for prefix in pool.states.published():
                snapshots.store_snapshot(prefix)
            pool.states.listener = snapshots
        self._stored.clear()
        pool.listener = listener

    def _detach(self) -> None:
        pool = self._pool()
        pool.listener = None
        if pool.states is not None:
            pool.states.listener = None

    def _flush_soon(self) -> None:
        if not self._is_due and self._listeners:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._is_due = False
        if self._is_cleared or self._stored or self._removed:
            changes = CacheChanges(self._is_cleared, tuple(self._stored), tuple(self._removed))
            self._is_cleared = False
            self._stored.clear()
            self._removed.clear()
            for listener in list(self._listeners):
                listener(changes)


def _tenant_of(prefix: Hashable) -> str | None:
    return None if isinstance(prefix, int) else tenant_of_root(prefix)
