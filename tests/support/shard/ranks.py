"""Ranks of groups, with this process as the first of each. They share memory, as those of a service do. The
other processes live as long as the test session, and import nothing."""

import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.support.shard.rank_forker import ForkedRank, RankForker
from tgis.shard.collectives import ProcessGroup, RendezvousPoint, connect
from tgis.shard.kernels.cpu.shared_memory.collectives import open_collectives
from tgis.shard.startup.platforms.interface import configure_torch

TIMEOUT_S = 60.0
ALONE = ProcessGroup(0, 1)


class Ranks(AbstractContextManager["Ranks"]):
    """Processes of the ranks, started when a group size first needs them."""

    def __init__(self, forker: RankForker, timeout_s: float = TIMEOUT_S) -> None:
        """`forker` runs `serve`; `timeout_s` is that of collectives."""
        self._forker, self._timeout_s = forker, timeout_s
        self._directory = Path(tempfile.mkdtemp(prefix="ranks-"))
        self._others: list[ForkedRank] = []  # rank 1, 2, ...
        self._groups: dict[int, ProcessGroup] = {1: ALONE}
        self._num_meetings = 0

    def run(self, size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Return the results of function(group, *args), a module-level function, on each of `size` ranks."""
        group = self._group(size)
        others = [other.pipe for other in self._others[: size - 1]]
        for pipe in others:
            pipe.send((size, function, args))
        try:
            results = [function(group, *args), *(_receive(pipe) for pipe in others)]
        except BaseException:
            self._abandon()
            raise
        return results

    def __exit__(self, *exception: object) -> None:
        self._abandon()

    def _abandon(self) -> None:
        """Kill ranks that failed or wait for a failed one, because the next test cannot use them and leaving
        takes long."""
        for other in self._others:
            other.kill()
        for other in self._others:
            other.join()
        for group in self._groups.values():
            group.leave()
        self._others, self._groups = [], {1: ALONE}

    def _group(self, size: int) -> ProcessGroup:
        if size not in self._groups:
            first = len(self._others)
            self._others += [self._forker.fork() for _ in range(first + 1, size)]
            for other in self._others[first:]:
                _receive(other.pipe)  # from here on, the timeout counts
            self._num_meetings += 1
            path = str(self._directory / f"rendezvous-{self._num_meetings}")
            for rank, other in enumerate(self._others[: size - 1], 1):
                other.pipe.send((size, None, (rank, size, path, self._timeout_s)))
            self._groups[size] = _connect(0, size, path, self._timeout_s)
        return self._groups[size]


def _receive(pipe: Connection) -> Any:
    assert pipe.poll(TIMEOUT_S), "a rank does not answer"
    result = pipe.recv()
    if isinstance(result, Exception):
        raise result
    return result


def _connect(rank: int, size: int, place: str, timeout_s: float) -> ProcessGroup:
    return connect(rank, size, RendezvousPoint(place), timeout_s, open_local=open_collectives)


def serve(pipe: Connection) -> None:
    """Run the functions that arrive, as a rank, until the pipe is closed."""
    configure_torch(1)
    pipe.send("ready")
    groups: dict[int, ProcessGroup] = {}
    while True:
        try:
            size, function, args = pipe.recv()
        except EOFError:
            return
        if function is None:
            groups[size] = _connect(*args)
        else:
            try:
                pipe.send(function(groups[size], *args))
            except Exception as error:
                pipe.send(error)
