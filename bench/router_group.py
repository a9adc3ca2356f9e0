"""Router workers and their engine process without a launcher's shards: `python -m bench.router_group WORKERS
OPTIONS`, with the options of a router. Processes that die are started again as by the launcher."""

import asyncio
import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from bench.service import free_ports
from tests.support.processes import Service, children_of
from tgis.launcher.router_group import RouterGroup
from tgis.process.child import Child, End

MODULE = "bench.router_group"
START_TIMEOUT_S = 120.0
POLL_S = 0.02


class RouterService:
    """A router with the engine inside, or with an engine process and workers."""

    def __init__(self, command: list[str], num_workers: int = 0, tree: Path | None = None) -> None:
        """Run the router that `command` describes from `tree`, another checkout, or our own. Without workers,
        the engine runs in the router's process."""
        self._num_workers = num_workers
        if num_workers:
            self.service = Service([str(num_workers), *command[1:]], module=MODULE)
        else:
            self.service = Service(command, **_from(tree))

    def wait_until_serving(self) -> None:
        self.service.wait_until_serving(START_TIMEOUT_S)
        deadline = time.monotonic() + START_TIMEOUT_S
        while sum("serving gRPC" in line for line in self.service.lines) < self._num_workers:
            assert time.monotonic() < deadline, self.service.output
            time.sleep(POLL_S)

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
        """Process id of the engine process, if there is one."""
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
    # -P, because the package in the working directory would come first
    return {"env": {"PYTHONPATH": str(tree.absolute())}, "python": (sys.executable, "-P")}


async def _run(num_workers: int, options: list[str]) -> End:
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="router-group-"))
        port, grpc_port = free_ports(2)
        options += ["--port", str(port), "--grpc-port", str(grpc_port), "--metrics-dir", directory]
        options += ["--engine-path", f"{directory}/engine", "--router-workers", str(num_workers)]
        engine = partial(Child, "engine process", ["engine", *options], "Engine: ", has_heartbeat=True)
        group = RouterGroup(engine, [partial(_make_worker, i, options) for i in range(num_workers)])
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, group.signal, signal.SIGTERM)
        await group.start()
        try:
            return await group.wait()
        finally:
            await group.kill()


def _make_worker(number: int, options: list[str]) -> Child:
    command = ["router", *options, "--worker", str(number)]
    return Child(f"router worker {number}", command, f"Router {number}: ", has_heartbeat=True)


def main() -> None:
    end = asyncio.run(_run(int(sys.argv[1]), sys.argv[2:]))
    if not end.is_success:
        sys.exit(f"error: {end.text}")


if __name__ == "__main__":
    main()
