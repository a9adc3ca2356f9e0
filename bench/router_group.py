"""Starts a router of one process, or router workers and their engine process, in front of shards that the
launcher does not manage."""

import sys
from pathlib import Path
from typing import Any

from tests.support.processes import Service, children_of
from tests.support.router import split_router


class RouterService:
    """Router with the engine in its process, or with an engine process and workers."""

    def __init__(self, command: list[str], num_workers: int = 0, tree: Path | None = None) -> None:
        """Run the router of `command` from the checkout `tree`, by default this one. Without workers, the
        engine runs in the router's process."""
        self._num_workers = num_workers
        if num_workers:
            env = {split_router.WORKERS: str(num_workers)}
            self.service = Service(command, env, split_router.MODULE, num_routers=num_workers)
        else:
            self.service = Service(command, **_from(tree))

    @property
    def grpc_target(self) -> str:
        return f"127.0.0.1:{self.service.grpc_port}"

    @property
    def http_target(self) -> str:
        return f"127.0.0.1:{self.service.http_port}"

    @property
    def routers(self) -> list[int]:
        """Process ids of the workers, or of the only process."""
        return self._children["router"] if self._num_workers else [self.service.process.pid]

    @property
    def engine(self) -> int | None:
        """Process id of the engine process; None without workers."""
        return self._children["engine"][0] if self._num_workers else None

    def end(self) -> None:
        self.service.end()

    @property
    def _children(self) -> dict[str, list[int]]:
        return children_of(self.service.process.pid)


def _from(tree: Path | None) -> dict[str, Any]:
    """Return the arguments of a Service that runs the package in `tree`."""
    if tree is None:
        return {}
    # -P, because otherwise the package in the working directory would come first
    path = f"{tree.absolute()}:{tree.absolute() / 'client'}"
    return {"env": {"PYTHONPATH": path}, "python": (sys.executable, "-P")}
