"""Assembles and runs the router: ports, shards, service and signals; startup, main loop and shutdown."""

import asyncio
import contextlib
import gc
import logging
import signal
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import grpc
import uvloop
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from tgis.config.processes import RouterConfig
from tgis.config.serving import SERVICE_NAME
from tgis.net.http_server import serve_http
from tgis.net.ports import PortError, reserve
from tgis.net.tls import Certificates, port_certificates
from tgis.pb import generation_pb2, shard_pb2
from tgis.pb.generation_pb2_grpc import add_GenerationServiceServicer_to_server
from tgis.process.child import GIVE_UP
from tgis.process.memory_release import MemoryRelease
from tgis.router.adapters.registry import AdapterRegistry
from tgis.router.adapters.residency import AdapterResidency
from tgis.router.api.grpc.auth_interceptor import AuthInterceptor, BearerTokens, warn_if_unprotected
from tgis.router.api.grpc.error_interceptor import ErrorInterceptor
from tgis.router.api.grpc.health import NAME as HEALTH
from tgis.router.api.grpc.health import Health
from tgis.router.api.grpc.refusal_pacing import RefusalPacing
from tgis.router.api.grpc.server_options import grpc_options
from tgis.router.api.grpc.servicer import GenerationService
from tgis.router.api.grpc.slow_clients import SlowClients
from tgis.router.api.http.metrics_app import http_app
from tgis.router.engine.engine import Engine
from tgis.router.errors import StartupError
from tgis.router.grammar.compiler import GrammarCompiler
from tgis.router.metrics.metrics import MetricLimits, Metrics
from tgis.router.metrics.resource_counts import check_balance, count_descriptors
from tgis.router.requests.accounting import Accounting
from tgis.router.requests.concurrency import ConcurrencyLimit
from tgis.router.requests.tracing import SERVICE, open_tracing
from tgis.router.requests.validation import RequestLimits, Validator
from tgis.router.scheduling.block_pool import BlockPool
from tgis.router.scheduling.proposers.prompt_lookup import PromptLookup
from tgis.router.scheduling.token_budget import TokenBudget
from tgis.router.shards.client import ShardClient
from tgis.router.shards.link import ShardLink, open_link
from tgis.router.text.detokenizer import Vocabulary
from tgis.router.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Clients that watch the health get this long to go elsewhere: gRPC cancels calls that arrive just as it
# stops.
DRAIN_NOTICE_S = 1.0
LAST_ANSWERS_S = 5.0  # time limit for answers still in transit after the last generation has ended


def run(config: RouterConfig) -> None:
    """Serve until SIGTERM or SIGINT, and return after the drain. A second signal cuts the drain short. The
    signal GIVE_UP also ends it, soon after it arrives. Raises StartupError and PortError."""
    uvloop.run(_Router(config).serve())


class _Router:
    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self._metrics = Metrics(_metric_limits(config))
        self._tracing = open_tracing(config.otlp_endpoint, config.otlp_service_name or SERVICE_NAME)
        self._grammar_compiler = GrammarCompiler()
        self._health = Health(SERVICE)
        self._metrics.ready.follow(lambda: self._health.is_ready)
        self._concurrency = ConcurrencyLimit(config.max_concurrent_requests)
        self._tokenize_concurrency = ConcurrencyLimit(config.max_concurrent_requests)
        self._metrics.permits_limit.follow(lambda: self._concurrency.limit)
        self._certificates = port_certificates(config)
        self._slow_clients = SlowClients(config.slow_reader_timeout)
        self._pacing, self._memory = RefusalPacing(), MemoryRelease()
        failures = self._metrics.request_failure
        self._interceptors: list[grpc.aio.ServerInterceptor] = [
            ErrorInterceptor(self._slow_clients, self._pacing, self._memory, failures)
        ]
        if config.auth_tokens_path:
            self._interceptors.insert(0, AuthInterceptor(BearerTokens(config.auth_tokens_path), failures))
        self._engine: Engine | None = None
        self._draining, self._aborting = asyncio.Event(), asyncio.Event()
        self._has_given_up = False

    async def serve(self) -> None:
        config = self._config
        tokenizer = Tokenizer(Path(config.tokenizer_path), config.tokenization_workers)
        # An unsupported kind of tokenizer is refused now, before the shards have loaded.
        vocabulary = Vocabulary(tokenizer, config.output_special_tokens)
        link = open_link(config)
        shards = ShardClient(link)
        adapters = AdapterRegistry(AdapterResidency(shards, self._metrics), self._metrics)
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)
        asyncio.get_running_loop().add_signal_handler(GIVE_UP, self._give_up)
        server = grpc.aio.server(interceptors=self._interceptors, options=grpc_options(config))
        # The bound port refuses clients that connect while the model loads, so that they go elsewhere and do
        # not wait.
        reserved = reserve(config.bind, config.grpc_port)
        host, grpc_port, *_ = reserved.getsockname()
        warn_if_unprotected(config, host)
        http = http_app(lambda: self._health.is_ready, self._metrics)
        async with serve_http(http, config, self._certificates) as http_port:
            try:
                info = await self._unless_draining(adapters.start())
                if info is None:
                    return
                if _is_encoder_decoder(info):
                    vocabulary = Vocabulary(tokenizer, config.output_special_tokens, is_continuation=False)
                self._start_engine(adapters, info, vocabulary, tokenizer, server)
                _open_grpc_port(server, config.bind, grpc_port, self._certificates)
                await server.start()
                gc.collect()
                gc.freeze()  # no later garbage collection scans the objects that exist now
                logger.info(
                    "serving gRPC on %s:%d, HTTP on %s:%d", config.bind, grpc_port, config.bind, http_port
                )
                await self._run(server, link)
            finally:
                reserved.close()
                await shards.close()
                tokenizer.close()
                self._grammar_compiler.close()
                await asyncio.to_thread(self._tracing.close)

    def _on_signal(self) -> None:
        if self._draining.is_set():
            self._aborting.set()
        self._draining.set()

    def _give_up(self) -> None:
        """End all requests and then the process, because the shards will not come back."""
        self._has_given_up = True
        if self._engine is not None:
            logger.error(
                "the shards will not be restarted; %d requests end with an error", self._engine.num_live
            )
            self._engine.give_up()
        self._draining.set()

    async def _unless_draining(self, waiting: Coroutine[Any, Any, T]) -> T | None:
        """Return the result of `waiting`, or None if the router is told to stop first."""
        task, draining = asyncio.create_task(waiting), asyncio.create_task(self._draining.wait())
        await asyncio.wait((task, draining), return_when=asyncio.FIRST_COMPLETED)
        for one in (task, draining):
            one.cancel()
        await asyncio.wait((task, draining))
        return None if task.cancelled() else task.result()

    async def _run(self, server: grpc.aio.Server, link: ShardLink) -> None:
        """Run the engine until a signal comes, and then drain. If the engine fails, so does the router."""
        assert self._engine is not None
        engine = asyncio.create_task(self._engine.run(), name="engine")
        draining = asyncio.create_task(self._draining.wait(), name="signals")
        background = [
            asyncio.create_task(each)
            for each in (
                self._watch_certificates(),
                link.watch(),
                self._slow_clients.watch(),
                self._memory.watch(),
            )
        ]
        await asyncio.wait((engine, draining), return_when=asyncio.FIRST_COMPLETED)
        if not engine.done():
            logger.info("draining %d requests", self._engine.num_live)
        has_callers = self._health.num_watches > 0 or self._has_given_up
        self._health.drain()
        self._pacing.end()
        if has_callers and not engine.done():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._aborting.wait(), DRAIN_NOTICE_S)
        timeout_s = LAST_ANSWERS_S if self._has_given_up else self._config.shutdown_timeout
        await self._stop(server, 0 if engine.done() else timeout_s)
        for task in (engine, draining, *background):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await engine
        self._engine.scheduler.abandon_steps()
        await check_balance(self._metrics.resource_counts)

    async def _watch_certificates(self) -> None:
        if (certificates := self._certificates) is not None:
            self._metrics.tls_seconds_left.follow(lambda: certificates.seconds_left)
            self._metrics.tls_refusals.follow(lambda: certificates.num_refusals)
            await certificates.watch()

    async def _stop(self, server: grpc.aio.Server, timeout_s: float) -> None:
        """Refuse new calls at once, and wait until a second signal for generations but no other streams."""
        stopping = asyncio.create_task(server.stop(timeout_s))
        idle = asyncio.create_task(self._concurrency.all_free.wait())
        aborting = asyncio.create_task(self._aborting.wait())
        await asyncio.wait((stopping, idle, aborting), return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait((stopping, aborting), timeout=LAST_ANSWERS_S, return_when=asyncio.FIRST_COMPLETED)
        for task in (idle, aborting):
            task.cancel()
        await server.stop(0)
        await stopping

    def _start_engine(
        self,
        adapters: AdapterRegistry,
        info: shard_pb2.InfoResponse,
        vocabulary: Vocabulary,
        tokenizer: Tokenizer,
        server: grpc.aio.Server,
    ) -> None:
        config = self._config
        limits = _limits(config, info, tokenizer)
        _check_capacity(info, limits.max_sequence_length)
        _check_vocabulary(info, tokenizer)
        budget = TokenBudget(config.max_step_tokens, config.decode_step_ms / 1000)
        self._engine = Engine(
            adapters.residency,
            BlockPool(info.num_blocks, info.block_size),
            vocabulary,
            self._metrics,
            max_batch_size=config.max_batch_size,
            rope_switch_len=info.rope_switch_len,
            proposer=PromptLookup(config.speculate, budget.predict) if config.speculate else None,
            budget=budget,
            steps_in_flight=config.steps_in_flight,
            recovery_timeout=config.recovery_timeout,
            on_ready=self._health.set,
        )
        validator = Validator(tokenizer, limits, self._grammar_compiler, self._metrics)
        kinds = generation_pb2.ModelInfoResponse
        self._metrics.permits_used.follow(lambda: self._concurrency.num_used)
        self._metrics.tasks.follow(lambda: len(asyncio.all_tasks()))
        self._metrics.descriptors.follow(count_descriptors)
        self._metrics.follow_resource("permit", self._concurrency.resource_count)
        self._metrics.resource_counts["tokenize permit"] = self._tokenize_concurrency.resource_count
        service = GenerationService(
            self._engine,
            validator,
            tokenizer,
            adapters,
            self._concurrency,
            self._tokenize_concurrency,
            Accounting(self._metrics, self._tracing, config.log_text_chars),
            kinds.ENCODER_DECODER if _is_encoder_decoder(info) else kinds.DECODER_ONLY,
        )
        add_GenerationServiceServicer_to_server(service, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection((SERVICE, HEALTH, reflection.SERVICE_NAME), server)


def _metric_limits(config: RouterConfig) -> MetricLimits:
    assert config.max_sequence_length is not None, "the launcher says how long a sequence may be"
    max_new_tokens = min(config.max_new_tokens, config.max_sequence_length - 1)
    return MetricLimits(config.max_sequence_length, max_new_tokens, config.max_batch_size)


def _limits(config: RouterConfig, info: shard_pb2.InfoResponse, tokenizer: Tokenizer) -> RequestLimits:
    limits = _metric_limits(config)
    if limits.max_new_tokens < config.max_new_tokens:
        logger.warning(
            "max_new_tokens is reduced to %d, the maximum sequence length minus one", limits.max_new_tokens
        )
    eos = list(info.eos_token_ids) or [i for i in (tokenizer.eos_token_id,) if i is not None]
    return RequestLimits(
        max_sequence_length=limits.max_sequence_length,
        max_new_tokens=limits.max_new_tokens,
        max_top_n_tokens=config.max_top_n_tokens,
        max_guided_bytes=config.max_guided_bytes,
        eos_token_ids=frozenset(eos),
        include_stop_sequence=config.default_include_stop_seqs,
        decoder_start_token_id=info.decoder_start_token_id if _is_encoder_decoder(info) else None,
        pad_token_id=info.pad_token_id,
        vocab_size=info.vocab_size,
    )


def _is_encoder_decoder(info: shard_pb2.InfoResponse) -> bool:
    return info.model_kind == shard_pb2.InfoResponse.MODEL_KIND_ENCODER_DECODER


def _check_capacity(info: shard_pb2.InfoResponse, max_sequence_length: int) -> None:
    """Check that a full sequence fits into the cache; else it would wait for ever. Raises StartupError."""
    # The last token is never computed. An encoder-decoder model keeps input and output in separate blocks,
    # which can take one block more.
    needed = -(-(max_sequence_length - 1) // info.block_size) + _is_encoder_decoder(info)
    if info.num_blocks < needed:
        raise StartupError(
            f"max_sequence_length {max_sequence_length} takes {needed} cache blocks of {info.block_size} "
            f"tokens, but the shards have only {info.num_blocks}"
        )


def _check_vocabulary(info: shard_pb2.InfoResponse, tokenizer: Tokenizer) -> None:
    if beyond := tokenizer.ids_beyond(info.vocab_size):
        logger.warning(
            "the tokenizer has %d token ids beyond the model's vocabulary of %d tokens, up to %d: requests "
            "whose text has one of them are refused",
            len(beyond),
            info.vocab_size,
            beyond[-1],
        )


def _open_grpc_port(server: grpc.aio.Server, bind: str, port: int, certificates: Certificates | None) -> None:
    """Open the gRPC port. Raises PortError if another process has begun to listen on it meanwhile."""
    address = f"[{bind}]:{port}" if ":" in bind else f"{bind}:{port}"
    try:
        if certificates is None:
            server.add_insecure_port(address)
        else:
            server.add_secure_port(address, certificates.credentials())
    except RuntimeError as error:
        raise PortError(f"port {port} on {bind} cannot be opened; is it in use?") from error
