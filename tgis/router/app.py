"""Runs the router: starts its components, serves until a signal arrives, drains and ends."""

import asyncio
import contextlib
import gc
import logging
import socket
import sys
from contextlib import AsyncExitStack, aclosing, closing
from pathlib import Path

import uvloop

from tgis.config.processes import RouterConfig
from tgis.net.addresses import http_url, local_host
from tgis.net.ports import reserve
from tgis.process.heartbeat import send_heartbeats
from tgis.process.memory.page_collapse import collapse_soon
from tgis.router.api.grpc.interceptors.auth_interceptor import warn_if_unprotected
from tgis.router.api.registry import served_http_names
from tgis.router.assembly import OpenEngine, RouterComponents, assemble
from tgis.router.drain import drain
from tgis.router.engine.local_engine import LocalEngine
from tgis.router.metrics.resource_counts import check_balance
from tgis.router.metrics.scrape import keep_published
from tgis.router.remote.remote_engine import RemoteEngine
from tgis.router.stop_signals import StopSignals

logger = logging.getLogger(__name__)


def run(config: RouterConfig, open_engine: OpenEngine | None = None) -> None:
    """Serve until SIGTERM or SIGINT, and return after the drain. A second signal ends the drain early. The
    signal GIVE_UP ends the router with a short drain. Without `open_engine`, the configuration determines
    whether the engine runs in this process. Raises StartupError and PortError."""
    opened = open_engine or (LocalEngine if config.engine_path is None else RemoteEngine)

    async def serve() -> None:
        router = _Router(config, assemble(config, opened))
        heartbeats = send_heartbeats(config.heartbeat_fd, lambda: router.is_serving)
        beating = asyncio.create_task(heartbeats, name="heartbeats")
        try:
            await router.serve()
        finally:
            beating.cancel()

    uvloop.run(serve())


class _Router:
    """Life of the router's components, from their start to their end."""

    def __init__(self, config: RouterConfig, components: RouterComponents) -> None:
        self._config = config
        self._components = components
        self._signals = StopSignals()
        self.is_serving = False

    async def serve(self) -> None:
        """Open the HTTP port, wait for the model, open the other ports, and serve until the drain has
        ended."""
        components = self._components
        http_ports = components.http_ports
        self._signals.install(components.engine.give_up)
        reserved = self._reserve_grpc_port()
        async with http_ports.serve() as http_port, AsyncExitStack() as api_ports, aclosing(components):
            with closing(reserved):
                _write_url(self._config, http_port)
                if not await self._signals.completes(components.engine.start()):
                    return
                self._prepare_vocabulary()
                _, grpc_port, *_ = reserved.getsockname()
                await components.grpc_port.start(grpc_port)
                api_port = await api_ports.enter_async_context(http_ports.serve_api())
                _freeze_memory()
                self.is_serving = True
                _log_ports(self._config, grpc_port, http_port, api_port)
                _print_ready_text(self._config)
                await self._run()

    def _reserve_grpc_port(self) -> socket.socket:
        """Bind the gRPC port without listening. While the model loads, it refuses clients, so that they
        choose another server and do not wait. Raises PortError."""
        config = self._config
        reserved = reserve(config.bind, config.grpc_port, config.shares_ports)
        host, *_ = reserved.getsockname()
        warn_if_unprotected(config, host)
        return reserved

    def _prepare_vocabulary(self) -> None:
        """Build the vocabulary for the model's kind of texts, so that the first request need not wait."""
        texts = self._components.texts
        info = self._components.engine.handle.info()
        if beyond := texts.tokenizer.ids_beyond(info.vocab_size):
            logger.warning(
                "the tokenizer has %d token ids beyond the model's vocabulary of %d tokens, up to %d: "
                "requests whose text has one of them are refused",
                len(beyond),
                info.vocab_size,
                beyond[-1],
            )
        texts.vocabulary(not info.is_encoder_decoder, frozenset())

    async def _run(self) -> None:
        """Run the engine until a signal arrives, and then drain. The router fails if the engine fails."""
        components = self._components
        engine = asyncio.create_task(components.engine.run(), name="engine")
        draining = asyncio.create_task(self._signals.draining.wait(), name="signals")
        background = self._start_background_tasks()
        await asyncio.wait((engine, draining), return_when=asyncio.FIRST_COMPLETED)
        await drain(components, self._signals, engine, self._config.shutdown_timeout)
        for task in (engine, draining, *background):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await engine
        await check_balance(components.metrics.resource_counts)

    def _start_background_tasks(self) -> list[asyncio.Task[None]]:
        components = self._components
        watches = (
            self._watch_certificates(),
            components.grpc_port.watch(),
            components.port_resources.memory.watch(),
            keep_published(components.metrics),
        )
        return [asyncio.create_task(watch) for watch in watches]

    async def _watch_certificates(self) -> None:
        """Reload certificates that change, and report how long they are valid, until cancelled."""
        metrics, certificates = self._components.metrics, self._components.port_resources.certificates
        if certificates is None:
            return
        metrics.tls_seconds_left.follow(lambda: certificates.seconds_left)
        if self._config.worker == 0:  # all workers read the same files, and each change counts once
            metrics.tls_refusals.follow(lambda: certificates.num_refusals)
        await certificates.watch()


def _write_url(config: RouterConfig, http_port: int) -> None:
    """Write the HTTP port's URL to the file in which `tgis top` finds it, if there is one."""
    if config.http_url_path is None:
        return
    url = http_url(local_host(config.bind), http_port, config.http_tls)
    try:
        Path(config.http_url_path).write_text(url + "\n")
    except OSError as error:  # a full disk, for example, must not stop the router
        logger.warning("`tgis top` needs --target here: %s: %s", config.http_url_path, error.strerror)


def _freeze_memory() -> None:
    gc.collect()
    gc.freeze()  # later garbage collections skip the objects that exist now
    collapse_soon()


def _log_ports(config: RouterConfig, grpc_port: int, http_port: int, api_port: int | None) -> None:
    apis = ", ".join(served_http_names(config.http_api))
    named = [("gRPC", grpc_port), ("HTTP", http_port), (f"{apis} API", api_port)]
    places = ", ".join(f"{name} on {config.bind}:{port}" for name, port in named if port is not None)
    logger.info("serving %s", places)


def _print_ready_text(config: RouterConfig) -> None:
    if config.ready_text and not config.json_output and config.worker == 0:
        print(f"\n{config.ready_text}\n", file=sys.stderr, flush=True)
