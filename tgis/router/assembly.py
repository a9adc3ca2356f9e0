"""Builds the router's components from the configuration and connects them."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from tgis.config.processes import RouterConfig
from tgis.config.serving import SERVICE_NAME
from tgis.net.tls import port_certificates
from tgis.process.memory.release import MemoryRelease
from tgis.router.api.bearer_tokens import BearerTokens
from tgis.router.api.grpc.health import Health
from tgis.router.api.grpc.port import GrpcPort
from tgis.router.api.http.service_parts import ServiceParts
from tgis.router.api.http.serving.ports import HttpPorts
from tgis.router.api.load_reports import LoadReports
from tgis.router.api.port_resources import PortResources
from tgis.router.api.registry import add_servicers, build_http_apis, served_rpc_services
from tgis.router.api.service import GenerationService
from tgis.router.chat.formats.registry import ChatFormats, choose_formats
from tgis.router.chat.renderer import ChatRenderer
from tgis.router.chat.template import ChatTemplate, load_template
from tgis.router.configured_metrics import open_metrics
from tgis.router.configured_rules import adapter_roots, request_limits, served_models, tenant_rules
from tgis.router.engine.handle import EngineHost
from tgis.router.grammar.compiler import GrammarCompiler
from tgis.router.metrics.engine_load import RecentLoad, read_engine_load
from tgis.router.metrics.metrics import Metrics
from tgis.router.metrics.request_rates import RequestRates
from tgis.router.metrics.scrape import Render, render_all, render_process
from tgis.router.requests.accounting import Accounting
from tgis.router.requests.shutdown import Shutdown
from tgis.router.requests.tracing import Tracing, open_tracing
from tgis.router.requests.validation import Validator
from tgis.router.text.detokenizer import Vocabulary
from tgis.router.text.tokenizer import Tokenizer

OpenEngine = Callable[[RouterConfig, Metrics, Callable[[bool], None]], EngineHost]
"""Function that opens an engine. Its last argument is called when shards connect and when they are lost."""


@dataclass(frozen=True)
class TextComponents:
    """Components that turn texts and chats into tokens and back."""

    tokenizer: Tokenizer
    vocabulary: Callable[[bool, frozenset[int]], Vocabulary]
    """Function that returns the vocabulary for texts, given True if they continue their input, and the
    special tokens that they show."""
    grammar_compiler: GrammarCompiler
    renderer: ChatRenderer
    formats: ChatFormats

    def close(self) -> None:
        self.tokenizer.close()
        self.grammar_compiler.close()
        self.renderer.close()


@dataclass(frozen=True)
class RouterComponents:
    metrics: Metrics
    tracing: Tracing
    texts: TextComponents
    engine: EngineHost
    service: GenerationService
    health: Health
    port_resources: PortResources
    grpc_port: GrpcPort
    http_ports: HttpPorts
    shutdown: Shutdown

    async def aclose(self) -> None:
        """Close all but the ports."""
        await self.engine.close()
        self.texts.close()
        await asyncio.to_thread(self.tracing.close)
        self.metrics.close()


def assemble(config: RouterConfig, open_engine: OpenEngine) -> RouterComponents:
    """Create and connect the components without waiting. The event loop must be running. Raises
    StartupError."""
    metrics = open_metrics(config)
    health = Health(*served_rpc_services(config))
    metrics.ready.follow(lambda: health.is_ready)
    tracing = _open_tracing(config)
    texts = _open_texts(config, metrics)
    engine = open_engine(config, metrics, health.set)
    load = RecentLoad(partial(read_engine_load, metrics, engine.gauges))
    resources = _open_port_resources(config, metrics, load)
    shutdown = Shutdown()
    accounting = Accounting(metrics, tracing, config.log_text_chars, shutdown)
    limits = request_limits(config)
    parts = ServiceParts(
        service=GenerationService(
            engine.handle,
            Validator(texts.tokenizer, limits, texts.grammar_compiler, metrics, engine.handle.info),
            texts.tokenizer,
            texts.vocabulary,
            accounting,
            tenant_rules(config, resources.tokens),
        ),
        renderer=texts.renderer,
        models=served_models(config, engine.handle),
        vocabulary=texts.vocabulary(True, frozenset()),
        limits=limits,
        tokenizer=texts.tokenizer,
        formats=texts.formats,
        config=config,
        is_ready=lambda: health.is_ready,
        adapter_roots=adapter_roots(config),
        load=load.read,
        watching=health.watching,
    )
    return RouterComponents(
        metrics,
        tracing,
        texts,
        engine,
        parts.service,
        health,
        resources,
        _build_grpc_port(parts, resources, health),
        _build_http_ports(parts, resources, engine),
        shutdown,
    )


def _open_tracing(config: RouterConfig) -> Tracing:
    worker = config.worker if config.router_workers > 1 else None
    return open_tracing(config.otlp_endpoint, config.otlp_service_name or SERVICE_NAME, worker)


def _open_texts(config: RouterConfig, metrics: Metrics) -> TextComponents:
    """Load the tokenizer and the chat template. Raises StartupError."""
    directory = Path(config.tokenizer_path)
    tokenizer = Tokenizer(directory, config.tokenization_workers, config.router_workers)
    vocabulary = cache(partial(Vocabulary, tokenizer, config.output_special_tokens))
    # This refuses an unsupported kind of tokenizer before the shards have loaded.
    vocabulary(True, frozenset())
    template = _load_template(config, directory)
    text = template.text if template else None
    return TextComponents(
        tokenizer,
        vocabulary,
        GrammarCompiler(),
        ChatRenderer(template, metrics=metrics),
        choose_formats(text, config.tool_call_parser, config.reasoning_parser),
    )


def _load_template(config: RouterConfig, directory: Path) -> ChatTemplate | None:
    """Return the model's chat template, if there is one and chats are served. Raises StartupError."""
    if not config.http_api:
        return None
    return load_template(directory, config.chat_template, config.tokenizer_config_path)


def _open_port_resources(config: RouterConfig, metrics: Metrics, load: RecentLoad) -> PortResources:
    """Read the certificates and tokens. Raises StartupError."""
    rates = RequestRates(metrics, config.metrics_dir)
    return PortResources(
        metrics,
        MemoryRelease(),
        LoadReports(load.read, rates, config.max_batch_size),
        port_certificates(config),
        BearerTokens(config.auth_tokens_path) if config.auth_tokens_path else None,
    )


def _build_grpc_port(parts: ServiceParts, resources: PortResources, health: Health) -> GrpcPort:
    port = GrpcPort(parts.config, resources, health, served_rpc_services(parts.config))
    add_servicers(port.server, parts)
    return port


def _build_http_ports(parts: ServiceParts, resources: PortResources, engine: EngineHost) -> HttpPorts:
    """Build the routes of all APIs. Raises StartupError."""
    render = _choose_render(parts.config, resources.metrics, engine)
    return HttpPorts(parts.config, resources, build_http_apis(parts), parts.is_ready, render)


def _choose_render(config: RouterConfig, metrics: Metrics, engine: EngineHost) -> Render:
    if config.metrics_dir is None:
        return render_process(metrics)
    return render_all(metrics, Path(config.metrics_dir), engine.gauges)
