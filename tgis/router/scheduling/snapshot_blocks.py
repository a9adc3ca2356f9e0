"""Cached blocks that can be used in models that keep a state: those before a snapshot of the state."""

from collections.abc import Hashable

from tgis.router.scheduling.block_pool import Edge, PoolListener


class SnapshotBlocks:
    """Listener to the blocks and the snapshots of a pool. It passes on to another listener only prefixes at
    or before a snapshot, because a sequence continues from the last snapshot among its cached blocks."""

    def __init__(self, target: PoolListener) -> None:
        self._target = target
        self._edges: dict[int, Edge] = {}  # of all published prefixes
        self._num_snapshots: dict[int, int] = {}  # at or after each prefix that was passed on
        self._paths: dict[Hashable, list[int]] = {}  # by snapshot: prefixes up to its own, the longest first

    def store(self, name: int, edge: Edge) -> None:
        self._edges[name] = edge

    def remove(self, name: int) -> None:
        self._edges.pop(name, None)
        if self._num_snapshots.pop(name, 0):
            self._target.remove(name)

    def clear(self) -> None:
        self._edges.clear()
        self._num_snapshots.clear()
        self._paths.clear()
        self._target.clear()

    def store_snapshot(self, prefix: Hashable) -> None:
        path = self._paths[prefix] = self._find_path(prefix)
        for name in reversed(path):  # parents come before their children
            count = self._num_snapshots[name] = self._num_snapshots.get(name, 0) + 1
            if count == 1:
                self._target.store(name, self._edges[name])

    def remove_snapshot(self, prefix: Hashable) -> None:
        for name in self._paths.pop(prefix, ()):
            count = self._num_snapshots.get(name, 0) - 1
            if count > 0:
                self._num_snapshots[name] = count
            elif count == 0:
                del self._num_snapshots[name]
                self._target.remove(name)

    def _find_path(self, prefix: Hashable) -> list[int]:
        """Return the names from a prefix to its root, or none if a block between them is gone."""
        path: list[int] = []
        while isinstance(prefix, int):
            edge = self._edges.get(prefix)
            if edge is None:
                return []
            path.append(prefix)
            prefix = edge[0]
        return path
