"""Serves HTTP APIs on a real socket in this process, in front of an engine and a fake shard. Records the
specs of the sequences that calls open in the engine."""

import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from tests.support.router.engine_pair import Scene, open_scene
from tests.support.router.fake_shard import VOCAB_SIZE
from tests.support.router.load import load_reports, no_other_processes
from tests.support.router.model_of_contents import Library
from tests.support.router.served_grpc import LIMITS, NO_RULES, RecordingHandle
from tests.support.tokenizers.trained import write_byte_level
from tgis.config.processes import RouterConfig
from tgis.net.http.server import serve_listener
from tgis.pb import shard_pb2
from tgis.process.memory.release import MemoryRelease
from tgis.router.api.bearer_tokens import BearerTokens
from tgis.router.api.grpc.health import Health
from tgis.router.api.http.service_parts import ServiceParts
from tgis.router.api.http.serving.answer_accounts import AnswerAccounts
from tgis.router.api.http.serving.app import ApiGate, Phase, api_route, starlette_of
from tgis.router.api.http.serving.load_header import LoadHeader
from tgis.router.api.models import Models
from tgis.router.api.registry import build_http_apis, model_placeholders
from tgis.router.api.service import GenerationService
from tgis.router.api.tenants import TenantRules
from tgis.router.chat.formats.registry import ChatFormats
from tgis.router.grammar.compiler import GrammarCompiler
from tgis.router.metrics.engine_load import read_engine_load
from tgis.router.requests.accounting import Accounting
from tgis.router.requests.tracing import Tracing
from tgis.router.requests.validation import RequestLimits, Validator
from tgis.router.text.detokenizer import Vocabulary
from tgis.router.text.tokenizer import Tokenizer

MODEL = "served-model"


LIMITS_OF_HTTP = replace(LIMITS, max_new_tokens=None, include_stop_sequence=False)


@dataclass
class ServedHttp:
    scene: Scene
    handle: RecordingHandle
    tokenizer: Tokenizer
    vocabulary: Vocabulary
    url: str
    """URL before `/v1`."""
    gate: ApiGate


@asynccontextmanager
async def open_http(
    directory: Path,
    renderer: Any = None,
    info: shard_pb2.InfoResponse | None = None,
    limits: RequestLimits = LIMITS_OF_HTTP,
    write_tokenizer: Any = write_byte_level,
    tracing: Tracing | None = None,
    tokens: Path | None = None,
    library: Library | None = None,
    adapter_roots: tuple[str, ...] | None = None,
    formats: ChatFormats | None = None,
    http_api: str = "openai",
    lmi_output_formatter: str | None = None,
    is_ready: Callable[[], bool] = lambda: True,
    port_options: Mapping[str, Any] | None = None,
    rules: TenantRules = NO_RULES,
    **options: Any,
) -> AsyncIterator[ServedHttp]:
    """Open the APIs. `renderer` is for chats, `tokens` a file of bearer tokens, `library` the shard's
    adapters, and `adapter_roots` the directories in which clients may find them. `rules` are those of tenants
    without their own. `port_options` and `options` are further options of the port and of the router's
    engine."""
    write_tokenizer(directory, VOCAB_SIZE)
    room = limits.max_sequence_length
    bearer = None if tokens is None else BearerTokens(str(tokens))
    async with open_scene(directory, False, info, library, room, **options) as scene:
        tokenizer, compiler = Tokenizer(directory, 1), GrammarCompiler()
        handle, vocabularies = RecordingHandle(scene.handle), cache(partial(Vocabulary, tokenizer, False))
        vocabulary = vocabularies(True, frozenset())
        service = GenerationService(
            handle,  # type: ignore[arg-type]
            Validator(tokenizer, limits, compiler, scene.metrics, handle.info),
            tokenizer,
            vocabularies,
            Accounting(scene.metrics, tracing or Tracing(), 0),
            lambda tenant: rules if bearer is None else bearer.rules_of(tenant, rules),
        )
        config = RouterConfig(
            tokenizer_path="",
            http_api=http_api,
            auth_tokens_path=None if tokens is None else str(tokens),
            lmi_output_formatter=lmi_output_formatter,
            **(port_options or {}),
        )
        models = Models(
            (MODEL, "alias"),
            adapter_ids=lambda: handle.info().preloaded_adapter_ids,
            placeholders=model_placeholders(config),
            given=None if adapter_roots is None else scene.handle,
        )
        formats = formats or ChatFormats()
        parts = ServiceParts(
            service,
            renderer,
            models,
            vocabulary,
            limits,
            tokenizer,
            formats,
            config,
            is_ready,
            adapter_roots,
            load=partial(read_engine_load, scene.metrics, no_other_processes),
            watching=Health().watching,
        )
        apis = [api for api in build_http_apis(parts) if api.is_served]
        gate = ApiGate(apis, config, scene.metrics.request_failure, MemoryRelease(), bearer)
        gate.phase = Phase.OPEN
        app = LoadHeader(AnswerAccounts(gate, apis, scene.metrics), load_reports(scene.metrics))
        probes = [route for each in apis for route in each.probes]
        listener = socket.create_server(("127.0.0.1", 0))
        try:
            async with serve_listener(
                starlette_of([*probes, api_route(app, apis, config, True)]), listener, config, None
            ) as port:
                yield ServedHttp(scene, handle, tokenizer, vocabulary, f"http://127.0.0.1:{port}", gate)
        finally:
            tokenizer.close()
            compiler.close()
        assert not scene.left()
