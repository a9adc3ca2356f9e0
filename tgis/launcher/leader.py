"""Implements the launcher of node 0, which starts, watches and stops the shards and the router.

It restarts a shard group that dies, and each of several router processes. If a router of a single process
dies, the launcher stops the service. No process outlives the launcher."""

import asyncio
import logging
import signal
import socket
from collections.abc import Sequence
from functools import partial

from tgis.config.option import to_flags
from tgis.config.processes import LauncherConfig
from tgis.launcher.child_configs import ChildConfigs, line_fields
from tgis.launcher.nodes.local_node import LocalNode, Node, run_all
from tgis.launcher.nodes.remote_nodes import RemoteNodes
from tgis.launcher.nodes.shard_process import ShardProcesses
from tgis.launcher.plan import END_S, GIVE_UP_S, LaunchError, Plan
from tgis.launcher.router_group import Router, RouterGroup
from tgis.launcher.run_files import RunFiles
from tgis.launcher.shard_group import Rendezvous, ShardGroup, file_rendezvous, port_rendezvous
from tgis.launcher.shard_health import serve_health
from tgis.launcher.shared_ports import SharedPorts
from tgis.net.ports import listen
from tgis.net.tls import link_certificates, mutual_server_context
from tgis.process.child import GIVE_UP, Child, End
from tgis.process.output_lines import LineForm

logger = logging.getLogger(__name__)

RESOLVE_S = 1.0  # between two attempts, because a pod may start before its name can be resolved


class Leader:
    def __init__(self, config: LauncherConfig, plan: Plan, shards: ShardProcesses) -> None:
        """Reserve the ports that several router workers share. Raises PortError and RunDirectoryError."""
        self._ports: SharedPorts[LauncherConfig] | None = None
        if plan.router_workers > 1:
            self._ports = SharedPorts(config)
            config = self._ports.config
        self._config = config
        self._num_workers = plan.router_workers
        self._files = RunFiles(plan, config.shard_uds_path, line_fields(config, "tokenizer"))
        self._configs = ChildConfigs(config, plan, self._files)
        self._addresses = self._files.path / "addresses"
        self._local = LocalNode(self._configs, shards)
        self._remote: RemoteNodes | None = None
        self._router: Router | None = None

    async def run(self) -> None:
        """Run the service until cancelled. Raises LaunchError if a process ends unexpectedly."""
        await self._files.prepare()
        if self._configs.uses_tcp:
            await self._run_over_tcp()
        else:
            await self._run_group([self._local], partial(file_rendezvous, self._files.path))

    async def drain(self, main: "asyncio.Task[None]", abort: "asyncio.Task[bool]") -> None:
        """Let the router finish its calls, while `main` watches the shards.

        Raises LaunchError if `abort` ends the wait."""
        if self._router is None:
            return
        self._router.signal(signal.SIGTERM)
        timeout_s = self._config.shutdown_timeout + END_S
        await asyncio.wait((main, abort), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if abort.done() and not main.done():
            raise LaunchError("a second signal ended the service at once")

    async def close(self) -> None:
        if self._router is not None:
            await self._router.kill()
        await self._local.kill()
        if self._remote is not None:
            await self._remote.close()
        if self._ports is not None:
            self._ports.close()
        self._files.remove()

    async def _run_over_tcp(self) -> None:
        """Run a group of shards over TCP. Raises PortError, CertificateError and LaunchError."""
        self._local.host = host = await _resolve(self._config.master_addr)
        certificates = link_certificates(self._config, mutual_server_context)
        remote = self._remote = RemoteNodes(self._config.nnodes - 1, self._configs.common, certificates)
        nodes: list[Node] = [self._local, *remote.nodes]
        with listen(host, self._config.master_port) as listener:
            await run_all((remote.serve(listener), self._run_group(nodes, partial(port_rendezvous, host))))

    async def _run_group(self, nodes: Sequence[Node], rendezvous: Rendezvous) -> None:
        """Run the shards, and the router or, if headless, health endpoints. Raises LaunchError if one
        ends."""
        addresses = self._addresses if self._configs.uses_tcp else None
        group = ShardGroup(nodes, rendezvous, addresses, self._config.startup_timeout)
        shards = asyncio.create_task(group.run())
        ends: list[asyncio.Task[None] | asyncio.Task[End]] = [shards]
        try:
            if self._config.headless:
                async with serve_health(self._config, lambda: group.is_serving):
                    await asyncio.wait(ends)
            else:
                router = self._router = self._make_router()
                await router.start()  # the router itself waits for the shards
                router_end = asyncio.create_task(router.wait())
                ends.append(router_end)
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                if not shards.done():
                    raise LaunchError(router_end.result().text)
                if group.has_served:  # calls may be running, and each must end with a status
                    router.signal(GIVE_UP)
                    await asyncio.wait([router_end], timeout=GIVE_UP_S)
            shards.result()
        finally:
            for end in ends:
                end.cancel()

    def _make_router(self) -> Router:
        if self._num_workers == 1:
            command = ["router", *to_flags(self._configs.router(self._addresses))]
            return Child("router", command, LineForm(fields=line_fields(self._config, "router")))
        return RouterGroup(
            self._make_engine, [partial(self._make_worker, i) for i in range(self._num_workers)]
        )

    def _make_engine(self) -> Child:
        config = self._configs.router(self._addresses)
        line_form = LineForm("Engine: ", line_fields(self._config, "engine"))
        command = ["engine", *to_flags(config)]
        return Child("engine process", command, line_form, has_heartbeat=True)

    def _make_worker(self, number: int) -> Child:
        config = self._configs.router(self._addresses, number)
        line_form = LineForm(f"Router {number}: ", line_fields(self._config, "router", vars(config)))
        command = ["router", *to_flags(config)]
        return Child(f"router worker {number}", command, line_form, has_heartbeat=True)


async def _resolve(name: str) -> str:
    """Wait until a host's name can be resolved, and return its address."""
    loop = asyncio.get_running_loop()
    is_logged = False
    while True:
        try:
            addresses = await loop.getaddrinfo(name, None, type=socket.SOCK_STREAM)
            return str(addresses[0][4][0])
        except OSError as error:
            if not is_logged:
                logger.warning("the name %s cannot be resolved yet: %s", name, error.strerror)
                is_logged = True
        await asyncio.sleep(RESOLVE_S)
