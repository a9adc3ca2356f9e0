"""Assembles and runs the router: ports, engine, service and signals; start, main loop and shutdown."""

import asyncio
import contextlib
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from functools import cache, partial
from pathlib import Path
from typing import Any

import grpc
import uvloop
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from tgis.config.processes import RouterConfig
from tgis.config.serving import SERVICE_NAME
from tgis.net.addresses import http_url, local_host
from tgis.net.ports import PortError, reserve
from tgis.net.tls import Certificates, port_certificates
from tgis.pb.orca_pb2_grpc import add_OpenRcaServiceServicer_to_server
from tgis.process.child import GIVE_UP
from tgis.process.heartbeat import send_heartbeats
from tgis.process.memory.page_collapse import collapse_soon
from tgis.process.memory.release import MemoryRelease
from tgis.router.api.bearer_tokens import BearerTokens
from tgis.router.api.grpc.health import NAME as HEALTH
from tgis.router.api.grpc.health import Health
from tgis.router.api.grpc.interceptors.auth_interceptor import AuthInterceptor, warn_if_unprotected
from tgis.router.api.grpc.interceptors.error_interceptor import ErrorInterceptor
from tgis.router.api.grpc.interceptors.gateway_interceptor import GatewayInterceptor
from tgis.router.api.grpc.interceptors.load_interceptor import LoadInterceptor
from tgis.router.api.grpc.load_service import NAME as LOAD_REPORTS
from tgis.router.api.grpc.load_service import LoadService
from tgis.router.api.grpc.refusal_pacing import RefusalPacing
from tgis.router.api.grpc.server_options import grpc_options
from tgis.router.api.grpc.slow_clients import SlowClients
from tgis.router.api.grpc.unsent_answers import shorten_send_errors
from tgis.router.api.http.service_parts import ServiceParts
from tgis.router.api.http.serving.ports import HttpPorts
from tgis.router.api.load_reports import LoadReports
from tgis.router.api.models import Models, served_names
from tgis.router.api.registry import (
    build_http_apis,
    model_placeholders,
    served_http_names,
    served_interfaces,
)
from tgis.router.api.service import GenerationService
from tgis.router.api.tenants import TenantRules
from tgis.router.chat.formats.registry import choose_formats
from tgis.router.chat.renderer import ChatRenderer
from tgis.router.chat.template import ChatTemplate, load_template
from tgis.router.configured_metrics import open_metrics
from tgis.router.engine.handle import EngineHost, EngineInfo
from tgis.router.engine.local_engine import LocalEngine
from tgis.router.grammar.compiler import GrammarCompiler
from tgis.router.metrics.engine_load import RecentLoad, read_engine_load
from tgis.router.metrics.metrics import Metrics
from tgis.router.metrics.request_rates import RequestRates
from tgis.router.metrics.resource_counts import check_balance, count_descriptors
from tgis.router.metrics.scrape import Render, keep_published, render_all, render_process
from tgis.router.remote.remote_engine import RemoteEngine
from tgis.router.requests.accounting import Accounting
from tgis.router.requests.tracing import open_tracing
from tgis.router.requests.validation import RequestLimits, Validator
from tgis.router.text.detokenizer import Vocabulary
from tgis.router.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# Time for clients that watch the health to choose another server. Without it, gRPC would cancel calls that
# arrive while it stops.
DRAIN_NOTICE_S = 1.0
LAST_ANSWERS_S = 5.0  # time limit for answers still in transit after the last generation has ended


OpenEngine = Callable[[RouterConfig, Metrics, Callable[[bool], None]], EngineHost]
"""Function that opens an engine. Its last argument is called when shards connect and when they are lost."""


def run(config: RouterConfig, open_engine: OpenEngine | None = None) -> None:
    """Serve until SIGTERM or SIGINT, and return after the drain. A second signal ends the drain early. The
    signal GIVE_UP ends the router with a short drain. Without `open_engine`, the configuration determines
    whether the engine runs in this process. Raises StartupError and PortError."""
    opened = open_engine or (LocalEngine if config.engine_path is None else RemoteEngine)

    async def serve() -> None:
        router = _Router(config, opened)
        heartbeats = send_heartbeats(config.heartbeat_fd, lambda: router.is_serving)
        beating = asyncio.create_task(heartbeats, name="heartbeats")
        try:
            await router.serve()
        finally:
            beating.cancel()

    uvloop.run(serve())


class _Router:
    def __init__(self, config: RouterConfig, open_engine: OpenEngine) -> None:
        """Create and connect all parts without waiting. The HTTP app comes last, because its routes may need
        any other part. The event loop must be running. Raises StartupError."""
        self._config = config
        self._metrics = open_metrics(config)
        worker = config.worker if config.router_workers > 1 else None
        self._tracing = open_tracing(config.otlp_endpoint, config.otlp_service_name or SERVICE_NAME, worker)
        self._grammar_compiler = GrammarCompiler()
        self._interfaces = served_interfaces(config)
        self._rpc_services = [each.rules.rpc_service for each in self._interfaces if each.rules.rpc_service]
        self._health = Health(*self._rpc_services)
        self._metrics.ready.follow(self._is_ready)
        self._certificates = port_certificates(config)
        self._slow_clients = SlowClients(config.slow_reader_timeout)
        self._pacing = RefusalPacing()
        self._memory = MemoryRelease()
        self._draining = asyncio.Event()
        self._aborting = asyncio.Event()
        self._has_given_up = self.is_serving = False
        self._tokenizer = Tokenizer(
            Path(config.tokenizer_path), config.tokenization_workers, config.router_workers
        )
        self._vocabulary = cache(partial(Vocabulary, self._tokenizer, config.output_special_tokens))
        # This refuses an unsupported kind of tokenizer before the shards have loaded.
        self._vocabulary(True, frozenset())
        self._engine = open_engine(config, self._metrics, self._health.set)
        self._tokens = BearerTokens(config.auth_tokens_path) if config.auth_tokens_path else None
        self._load = RecentLoad(partial(read_engine_load, self._metrics, self._engine.gauges))
        rates = RequestRates(self._metrics, config.metrics_dir)
        self._load_reports = LoadReports(self._load.read, rates, config.max_batch_size)
        self._load_service = LoadService(self._load_reports)
        self._limits = _limits(config)
        self._service = self._build_service()
        self._template = self._load_template()
        self._renderer = ChatRenderer(self._template, metrics=self._metrics)
        self._parts = self._collect_parts()
        self._server = self._build_server()
        self._http = HttpPorts(
            config,
            self._is_ready,
            self._metrics,
            build_http_apis(self._parts),
            self._certificates,
            self._scrape(),
            self._memory,
            self._load_reports,
            self._tokens,
        )

    def _is_ready(self) -> bool:
        return self._health.is_ready

    def _build_service(self) -> GenerationService:
        config = self._config
        metrics = self._metrics
        engine = self._engine.handle
        metrics.tasks.follow(lambda: len(asyncio.all_tasks()))
        metrics.descriptors.follow(count_descriptors)
        return GenerationService(
            engine,
            Validator(self._tokenizer, self._limits, self._grammar_compiler, metrics, engine.info),
            self._tokenizer,
            self._vocabulary,
            Accounting(metrics, self._tracing, config.log_text_chars),
            _tenant_rules(config, self._tokens),
        )

    def _scrape(self) -> Render:
        if self._config.metrics_dir is None:
            return render_process(self._metrics)
        return render_all(self._metrics, Path(self._config.metrics_dir), self._engine.gauges)

    def _load_template(self) -> ChatTemplate | None:
        """Return the model's chat template, if there is one and chats are served. Raises StartupError."""
        config = self._config
        if not config.http_api:
            return None
        return load_template(Path(config.tokenizer_path), config.chat_template, config.tokenizer_config_path)

    def _collect_parts(self) -> ServiceParts:
        """Return the parts that handlers of the APIs use. Raises StartupError."""
        config = self._config
        engine = self._engine.handle
        template = self._template
        return ServiceParts(
            self._service,
            self._renderer,
            Models(
                _served_names(config),
                adapter_ids=lambda: engine.info().preloaded_adapter_ids,
                placeholders=model_placeholders(config),
                given=engine if config.runtime_adapters else None,
            ),
            self._vocabulary(True, frozenset()),
            self._limits,
            self._tokenizer,
            choose_formats(
                template.text if template else None, config.tool_call_parser, config.reasoning_parser
            ),
            config,
            self._is_ready,
            adapter_roots=_adapter_roots(config),
            load=self._load.read,
            watching=self._health.watching,
        )

    def _build_server(self) -> grpc.aio.Server:
        config = self._config
        failures = self._metrics.request_failure
        interceptors: list[grpc.aio.ServerInterceptor] = [
            LoadInterceptor(self._load_reports),
            ErrorInterceptor(self._slow_clients, self._pacing, self._memory, failures),
        ]
        if config.trust_metadata:
            interceptors.insert(0, GatewayInterceptor(config.trust_metadata))
        if self._tokens is not None:
            interceptors.insert(0, AuthInterceptor(self._tokens, failures))
        shorten_send_errors()
        server = grpc.aio.server(interceptors=interceptors, options=grpc_options(config))
        for interface in self._interfaces:
            if interface.add_servicer is not None:
                interface.add_servicer(server, self._parts)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        add_OpenRcaServiceServicer_to_server(self._load_service, server)
        services = (*self._rpc_services, HEALTH, LOAD_REPORTS, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(services, server)
        return server

    async def serve(self) -> None:
        config = self._config
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)
        asyncio.get_running_loop().add_signal_handler(GIVE_UP, self._give_up)
        # The port is bound but not listening while the model loads. It refuses clients, so that they choose
        # another server and do not wait.
        reserved = reserve(config.bind, config.grpc_port, config.shares_ports)
        host, grpc_port, *_ = reserved.getsockname()
        warn_if_unprotected(config, host)
        async with self._http.serve() as http_port, AsyncExitStack() as stack:
            _write_url(config, http_port)
            try:
                if not await self._unless_draining(self._engine.start()):
                    return
                info = self._engine.handle.info()
                _check_vocabulary(info, self._tokenizer)
                # Build the vocabulary now, so that the first request need not wait.
                self._vocabulary(not info.is_encoder_decoder, frozenset())
                _open_grpc_port(self._server, config.bind, grpc_port, self._certificates)
                await self._server.start()
                api_port = await stack.enter_async_context(self._http.serve_api())
                gc.collect()
                gc.freeze()  # later garbage collections skip the objects that exist now
                collapse_soon()
                self.is_serving = True
                _log_ports(config, grpc_port, http_port, api_port)
                _print_ready_text(config)
                await self._run()
            finally:
                reserved.close()
                await self._engine.close()
                self._tokenizer.close()
                self._grammar_compiler.close()
                self._renderer.close()
                await asyncio.to_thread(self._tracing.close)
                self._metrics.close()

    def _on_signal(self) -> None:
        if self._draining.is_set():
            self._aborting.set()
        self._draining.set()

    def _give_up(self) -> None:
        """Fail all requests and end the process, because the shards will not return."""
        self._has_given_up = True
        self._engine.give_up()
        self._draining.set()

    async def _unless_draining(self, waiting: Coroutine[Any, Any, None]) -> bool:
        """Wait for `waiting`. Return False if a stop signal arrives first."""
        task = asyncio.create_task(waiting)
        draining = asyncio.create_task(self._draining.wait())
        await asyncio.wait((task, draining), return_when=asyncio.FIRST_COMPLETED)
        for one in (task, draining):
            one.cancel()
        await asyncio.wait((task, draining))
        if task.cancelled():
            return False
        task.result()
        return True

    async def _run(self) -> None:
        """Run the engine until a signal arrives, and then drain. The router fails if the engine fails."""
        engine = asyncio.create_task(self._engine.run(), name="engine")
        draining = asyncio.create_task(self._draining.wait(), name="signals")
        background = [
            asyncio.create_task(each)
            for each in (
                self._watch_certificates(),
                self._slow_clients.watch(),
                self._memory.watch(),
                keep_published(self._metrics),
            )
        ]
        await asyncio.wait((engine, draining), return_when=asyncio.FIRST_COMPLETED)
        if not engine.done():
            logger.info("draining %d requests", self._engine.num_live)
        has_callers = self._health.num_watches > 0 or self._has_given_up
        self._health.drain()
        self._pacing.end()
        self._load_service.end()
        if has_callers and not engine.done():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._aborting.wait(), DRAIN_NOTICE_S)
        timeout_s = LAST_ANSWERS_S if self._has_given_up else self._config.shutdown_timeout
        await self._stop(0 if engine.done() else timeout_s)
        for task in (engine, draining, *background):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await engine
        await check_balance(self._metrics.resource_counts)

    async def _watch_certificates(self) -> None:
        if (certificates := self._certificates) is not None:
            self._metrics.tls_seconds_left.follow(lambda: certificates.seconds_left)
            if self._config.worker == 0:  # all workers read the same files, and each change counts once
                self._metrics.tls_refusals.follow(lambda: certificates.num_refusals)
            await certificates.watch()

    async def _stop(self, timeout_s: float) -> None:
        """Refuse new calls immediately, and wait until the generations end or a second signal arrives. Other
        streams do not delay the end."""
        stopping = asyncio.create_task(self._stop_ports(timeout_s))
        idle = asyncio.create_task(self._service.is_idle.wait())
        aborting = asyncio.create_task(self._aborting.wait())
        await asyncio.wait((stopping, idle, aborting), return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait((stopping, aborting), timeout=LAST_ANSWERS_S, return_when=asyncio.FIRST_COMPLETED)
        for task in (idle, aborting):
            task.cancel()
        self._http.cut()
        await self._server.stop(0)
        await stopping

    async def _stop_ports(self, timeout_s: float) -> None:
        """Refuse new calls, and abort the remaining ones after the time limit."""
        await asyncio.gather(self._server.stop(timeout_s), self._http.stop(timeout_s))


def _adapter_roots(config: RouterConfig) -> tuple[str, ...] | None:
    roots = (config.adapter_roots or "").split(os.pathsep)
    return tuple(filter(None, roots)) if config.runtime_adapters else None


def _tenant_rules(config: RouterConfig, tokens: BearerTokens | None) -> Callable[[str], TenantRules]:
    """Return a function that returns a tenant's rules."""
    default = TenantRules(
        config.priority_floor,
        config.tenant_requests_per_minute,
        config.tenant_tokens_per_minute,
        config.tenant_concurrent_requests,
    )
    if tokens is None:
        return lambda tenant: default
    return lambda tenant: tokens.rules_of(tenant, default)


def _served_names(config: RouterConfig) -> tuple[str, ...]:
    """Return the names under which the APIs serve the model. Raises StartupError."""
    if not any(each.names_models for each in served_interfaces(config)):
        return ("model",)
    return served_names(config.served_model_name, config.tokenizer_path)


def _log_ports(config: RouterConfig, grpc_port: int, http_port: int, api_port: int | None) -> None:
    apis = ", ".join(served_http_names(config.http_api))
    named = [("gRPC", grpc_port), ("HTTP", http_port), (f"{apis} API", api_port)]
    places = ", ".join(f"{name} on {config.bind}:{port}" for name, port in named if port is not None)
    logger.info("serving %s", places)


def _print_ready_text(config: RouterConfig) -> None:
    if config.ready_text and not config.json_output and config.worker == 0:
        print(f"\n{config.ready_text}\n", file=sys.stderr, flush=True)


def _write_url(config: RouterConfig, http_port: int) -> None:
    if config.http_url_path is None:
        return
    url = http_url(local_host(config.bind), http_port, config.http_tls)
    try:
        Path(config.http_url_path).write_text(url + "\n")
    except OSError as error:  # a full disk, for example, must not stop the router
        logger.warning("`tgis top` needs --target here: %s: %s", config.http_url_path, error.strerror)


def _limits(config: RouterConfig) -> RequestLimits:
    assert config.max_sequence_length is not None, "the launcher says how long a sequence may be"
    max_new_tokens = config.max_new_tokens
    room = config.max_sequence_length - 1
    if max_new_tokens is not None and room < max_new_tokens:
        logger.warning("max_new_tokens is reduced to %d, the maximum sequence length minus one", room)
    return RequestLimits(
        max_sequence_length=config.max_sequence_length,
        max_new_tokens=max_new_tokens if max_new_tokens is None else min(max_new_tokens, room),
        max_top_n_tokens=config.max_top_n_tokens,
        max_guided_bytes=config.max_guided_bytes,
        include_stop_sequence=config.default_include_stop_seqs,
        watermark_gamma=config.watermark_gamma,
        watermark_delta=config.watermark_delta,
        max_input_tokens=config.max_input_tokens,
        max_best_of=config.max_best_of,
        max_stop_sequences=config.max_stop_sequences,
        max_client_batch_size=config.max_client_batch_size,
        allows_guided=not config.disable_grammar_support,
    )


def _check_vocabulary(info: EngineInfo, tokenizer: Tokenizer) -> None:
    if beyond := tokenizer.ids_beyond(info.vocab_size):
        logger.warning(
            "the tokenizer has %d token ids beyond the model's vocabulary of %d tokens, up to %d: requests "
            "whose text has one of them are refused",
            len(beyond),
            info.vocab_size,
            beyond[-1],
        )


def _open_grpc_port(server: grpc.aio.Server, bind: str, port: int, certificates: Certificates | None) -> None:
    """Open the gRPC port. Raises PortError if another process listens on it now."""
    address = f"[{bind}]:{port}" if ":" in bind else f"{bind}:{port}"
    try:
        if certificates is None:
            server.add_insecure_port(address)
        else:
            server.add_secure_port(address, certificates.credentials())
    except RuntimeError as error:
        raise PortError(f"port {port} on {bind} cannot be opened; is it in use?") from error
