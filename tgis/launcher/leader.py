"""The launcher of node 0. It starts the shards and the router, watches them and stops them.

A shard group that dies is started again. If the router dies, everything is stopped. No process outlives the
launcher."""

import asyncio
import logging
import signal
import socket
from collections.abc import Sequence

from tgis.config.option import to_flags
from tgis.config.processes import LauncherConfig
from tgis.launcher.child_configs import ChildConfigs, line_fields
from tgis.launcher.local_node import LocalNode, Node, all_of
from tgis.launcher.plan import END_S, GIVE_UP_S, LaunchError, Plan
from tgis.launcher.remote_nodes import Members
from tgis.launcher.run_files import RunFiles
from tgis.launcher.shard_group import FileRendezvous, Group, PortRendezvous
from tgis.launcher.shard_health import serve_health
from tgis.net.ports import listen
from tgis.net.tls import link_certificates, mutual_server_context
from tgis.process.child import GIVE_UP, Child, End

logger = logging.getLogger(__name__)

RESOLVE_S = 1.0  # between two attempts, because a pod may start before its name can be resolved


class Service:
    """Launcher of node 0, which may be the only node."""

    def __init__(self, config: LauncherConfig, planned: Plan) -> None:
        """Check that the ports are free. Raises PortError if one is taken, and RunDirectoryError."""
        for port in (config.port,) if config.headless else (config.port, config.grpc_port):
            listen(config.bind, port).close()  # the router opens the port when the model is loaded
        self._config = config
        self._files = RunFiles(planned, config.shard_uds_path, line_fields(config, "tokenizer"))
        self._configs = ChildConfigs(config, planned, self._files)
        self._addresses = self._files.path / "addresses"
        self._local = LocalNode(self._configs)
        self._members: Members | None = None
        self._router: Child | None = None
        self._aborting = asyncio.Event()

    async def run(self) -> None:
        """Run the service until it fails or is cancelled.

        Raises LaunchError when a process has ended that should still run."""
        await self._files.prepare()
        if self._configs.spans:
            await self._run_spanning()
        else:
            await self._run_group([self._local], FileRendezvous(self._files.path))

    async def drain(self, main: "asyncio.Task[None]") -> None:
        """Let the router finish the calls in flight. `main` keeps watching the shards meanwhile.

        Raises LaunchError if a second signal interrupts this."""
        if self._router is None:
            return
        self._router.signal(signal.SIGTERM)
        aborting = asyncio.create_task(self._aborting.wait())
        timeout_s = self._config.shutdown_timeout + END_S
        await asyncio.wait((main, aborting), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        aborting.cancel()
        if self._aborting.is_set() and not main.done():
            raise LaunchError("a second signal ended the service at once")

    def abort(self) -> None:
        self._aborting.set()

    async def close(self) -> None:
        if self._router is not None:
            await self._router.kill()
        await self._local.kill()
        if self._members is not None:
            await self._members.close()
        await self._files.remove()

    async def _run_spanning(self) -> None:
        """Run a group that spans several nodes. Raises PortError, CertificateError and LaunchError."""
        self._local.host = host = await _resolve(self._config.master_addr)
        certificates = link_certificates(self._config, mutual_server_context)
        members = self._members = Members(self._config.nnodes - 1, self._configs.common, certificates)
        nodes: list[Node] = [self._local, *members.nodes]
        with listen(host, self._config.master_port) as listener:
            await all_of((members.serve(listener), self._run_group(nodes, PortRendezvous(host))))

    async def _run_group(self, nodes: Sequence[Node], rendezvous: FileRendezvous | PortRendezvous) -> None:
        """Run the shards, and the router or (headless) the health endpoints.

        Raises LaunchError when a process has ended that should still run."""
        group = Group(nodes, rendezvous, self._addresses if self._configs.spans else None)
        shards = asyncio.create_task(group.run())
        ends: list[asyncio.Task[None] | asyncio.Task[End]] = [shards]
        try:
            if self._config.headless:
                async with serve_health(self._config, lambda: group.is_serving):
                    await asyncio.wait(ends)
            else:
                own = self._configs.router(self._addresses)
                fields = self._configs.line_fields(own)
                router = self._router = Child("router", ["router", *to_flags(own)], fields=fields)
                await router.start()  # the router itself waits for the shards
                router_end = asyncio.create_task(router.wait())
                ends.append(router_end)
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                if not shards.done():
                    raise LaunchError(router_end.result().text)
                if group.has_served:  # calls may be in flight, and each must end with a status
                    router.signal(GIVE_UP)
                    await asyncio.wait([router_end], timeout=GIVE_UP_S)
            shards.result()
        finally:
            for end in ends:
                end.cancel()


async def _resolve(name: str) -> str:
    """Return the address of a host; wait until its name can be resolved."""
    loop, is_told = asyncio.get_running_loop(), False
    while True:
        try:
            found = await loop.getaddrinfo(name, None, type=socket.SOCK_STREAM)
            return str(found[0][4][0])
        except OSError as error:
            if not is_told:
                logger.warning("%s is not known yet: %s", name, error.strerror)
                is_told = True
        await asyncio.sleep(RESOLVE_S)
