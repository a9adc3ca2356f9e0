"""A group of two ranks, of which this process is the first, to run the same function on both."""

import multiprocessing
from collections.abc import Callable
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tgis.shard.threads import configure
from tgis.shard.world import join

TIMEOUT_S = 60.0


class Pair(AbstractContextManager["Pair"]):
    def __init__(self, rendezvous: Path):
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(str(rendezvous), theirs), daemon=True)
        self._process.start()
        self.world = join(0, 2, str(rendezvous), TIMEOUT_S)

    def run(self, function: Callable[..., Any], *args: Any) -> tuple[Any, Any]:
        """What function(world, *args), of a module, gives on rank 0 and on rank 1."""
        self._pipe.send((function, args))
        mine = function(self.world, *args)
        assert self._pipe.poll(TIMEOUT_S), "rank 1 does not answer"
        theirs = self._pipe.recv()
        if isinstance(theirs, Exception):
            raise theirs
        return mine, theirs

    def __exit__(self, *exception: object) -> None:
        self._pipe.send(None)
        self._process.join(10)
        self._process.kill()
        self.world.leave()


def _serve(rendezvous: str, pipe: Connection) -> None:
    configure(1)
    world = join(1, 2, rendezvous, TIMEOUT_S)
    while (work := pipe.recv()) is not None:
        function, args = work
        try:
            pipe.send(function(world, *args))
        except Exception as error:
            pipe.send(error)
    world.leave()
