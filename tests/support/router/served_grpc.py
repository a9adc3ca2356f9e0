"""Serves the router's gRPC port in this process, in front of an engine and a fake shard. Records the specs of
the sequences that calls open in the engine."""

from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from tests.support.router.engine_pair import Scene, open_scene
from tests.support.router.fake_shard import VOCAB_SIZE
from tests.support.router.load import load_reports
from tests.support.tls_files import Files
from tests.support.tokenizers.trained import write_byte_level
from tgis.config.processes import RouterConfig
from tgis.net.tls import Certificates, TlsFiles
from tgis.pb import shard_pb2
from tgis.pb.generation_pb2_grpc import GenerationServiceStub, add_GenerationServiceServicer_to_server
from tgis.process.memory.release import MemoryRelease
from tgis.router.api.bearer_tokens import BearerTokens
from tgis.router.api.fmaas.servicer import GenerationServicer
from tgis.router.api.grpc.interceptors.auth_interceptor import AuthInterceptor
from tgis.router.api.grpc.interceptors.error_interceptor import ErrorInterceptor
from tgis.router.api.grpc.interceptors.gateway_interceptor import GatewayInterceptor
from tgis.router.api.grpc.interceptors.load_interceptor import LoadInterceptor
from tgis.router.api.grpc.refusal_pacing import RefusalPacing
from tgis.router.api.grpc.server_options import grpc_options
from tgis.router.api.grpc.slow_clients import SlowClients
from tgis.router.api.service import GenerationService
from tgis.router.api.tenants import TenantRules
from tgis.router.engine.handle import EngineHandle, SequenceSpec
from tgis.router.grammar.compiler import GrammarCompiler
from tgis.router.requests.accounting import Accounting
from tgis.router.requests.tracing import Tracing
from tgis.router.requests.validation import RequestLimits, Validator
from tgis.router.text.detokenizer import Vocabulary
from tgis.router.text.tokenizer import Tokenizer

NO_RULES = TenantRules()
LIMITS = RequestLimits(
    max_sequence_length=200,
    max_new_tokens=199,
    max_top_n_tokens=5,
    max_guided_bytes=1000,
    include_stop_sequence=True,
    watermark_gamma=0.25,
    watermark_delta=1.5,
)


class RecordingHandle:
    """Handle that records the specs of opened sequences."""

    def __init__(self, handle: EngineHandle) -> None:
        self._handle = handle
        self.specs: list[SequenceSpec] = []

    def open(self, claim_id: Any, spec: SequenceSpec, *more: Any) -> Any:
        self.specs.append(spec)
        return self._handle.open(claim_id, spec, *more)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)


@dataclass
class ServedGrpc:
    scene: Scene
    handle: RecordingHandle
    tokenizer: Tokenizer
    target: str
    stub: Any = field(init=False)

    def num_failures(self, kind: str) -> float:
        return self.scene.metrics.request_failure.values().get((kind,), 0)

    def take_specs(self) -> list[SequenceSpec]:
        """Return the specs recorded since the last call."""
        specs, self.handle.specs = self.handle.specs, []
        return specs


@asynccontextmanager
async def open_grpc(
    directory: Path,
    tokens_path: Path | None = None,
    files: Files | None = None,
    info: shard_pb2.InfoResponse | None = None,
    limits: RequestLimits = LIMITS,
    tracing: Tracing | None = None,
    rules: TenantRules = NO_RULES,
    trusted_key: str | None = None,
    **options: Any,
) -> AsyncIterator[ServedGrpc]:
    """Open the port. `rules` are those of tenants without their own. `options` has further options of the
    router's engine."""
    tokens = None if tokens_path is None else BearerTokens(str(tokens_path))
    write_byte_level(directory, VOCAB_SIZE)
    async with open_scene(directory, False, info, **options) as scene:
        tokenizer, compiler, handle = (
            Tokenizer(directory, 1),
            GrammarCompiler(),
            RecordingHandle(scene.handle),
        )
        accounting = Accounting(scene.metrics, tracing or Tracing(), 0)
        service = _service(
            scene,
            handle,
            tokenizer,
            compiler,
            limits,
            accounting,
            lambda tenant: rules if tokens is None else tokens.rules_of(tenant, rules),
        )
        failures = scene.metrics.request_failure
        interceptors: list[Any] = [
            LoadInterceptor(load_reports(scene.metrics)),
            ErrorInterceptor(SlowClients(60), RefusalPacing(), MemoryRelease(), failures),
        ]
        if trusted_key is not None:
            interceptors.insert(0, GatewayInterceptor(trusted_key))
        if tokens is not None:
            interceptors.insert(0, AuthInterceptor(tokens, failures))
        options = grpc_options(RouterConfig(tokenizer_path=""))
        server = grpc.aio.server(interceptors=interceptors, options=options)
        add_GenerationServiceServicer_to_server(GenerationServicer(service, tokenizer), server)
        port = _open_port(server, files)
        await server.start()
        served = ServedGrpc(scene, handle, tokenizer, f"localhost:{port}")
        try:
            async with open_channel(served) as served.stub:
                yield served
        finally:
            await server.stop(0)
            tokenizer.close()
            compiler.close()
        assert not scene.left()


@asynccontextmanager
async def open_channel(
    served: ServedGrpc, credentials: grpc.ChannelCredentials | None = None
) -> AsyncIterator[GenerationServiceStub]:
    if credentials is None:
        channel = grpc.aio.insecure_channel(served.target)
    else:
        channel = grpc.aio.secure_channel(served.target, credentials)
    async with channel:
        yield GenerationServiceStub(channel)


def _service(
    scene: Scene,
    handle: Any,
    tokenizer: Tokenizer,
    compiler: GrammarCompiler,
    limits: RequestLimits,
    accounting: Accounting,
    rules_of: Callable[[str], TenantRules],
) -> GenerationService:
    vocabulary = Vocabulary(tokenizer)
    validator = Validator(tokenizer, limits, compiler, scene.metrics, handle.info)
    return GenerationService(handle, validator, tokenizer, lambda *_: vocabulary, accounting, rules_of)


def _open_port(server: grpc.aio.Server, files: Files | None) -> int:
    if files is None:
        return server.add_insecure_port("localhost:0")
    paths = [str(files.directory / f"{name}.pem") for name in ("cert", "key", "ca")]
    return server.add_secure_port("localhost:0", Certificates(TlsFiles(*paths)).credentials())


async def status_of(call: Any) -> tuple[grpc.StatusCode, str]:
    """Return the status and text of a unary call or a stream."""
    try:
        if hasattr(call, "__aiter__"):
            async for _ in call:
                pass
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or ""
    return grpc.StatusCode.OK, ""


def texts_of(tokens: Iterable[Any]) -> list[str]:
    return [token.text for token in tokens]
