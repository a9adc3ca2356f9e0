"""Implements `vllm.grpc.engine.VllmEngine`."""

import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from datetime import UTC, datetime
from functools import cached_property
from importlib.metadata import version
from pathlib import Path

import grpc
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineServicer as Servicer

from tgis.router.api.grpc.call_status import CallRefusedError, Context
from tgis.router.api.http.default_sampling import read_default_sampling
from tgis.router.api.http.service_parts import ServiceParts
from tgis.router.api.merged_streams import merge
from tgis.router.api.renamed_parameters import renamed_log_text, renamed_text
from tgis.router.api.service import Result
from tgis.router.api.tenants import is_operator, tenant_of
from tgis.router.api.vllm_engine.cache_feed import CacheFeeds
from tgis.router.api.vllm_engine.calls import AbortedError, LiveCalls
from tgis.router.api.vllm_engine.load_records import LoadRecords, scheduler_load
from tgis.router.api.vllm_engine.model_facts import find_model, read_model_info
from tgis.router.api.vllm_engine.requests import NAMES, read_call, read_logprob_counts
from tgis.router.api.vllm_engine.responses import GenerateWriter
from tgis.router.api.vllm_engine.tokenizer_files import TokenizerFiles, split
from tgis.router.engine.handle import CallName
from tgis.router.errors import RequestError
from tgis.router.events import InputTokens
from tgis.router.requests.call import GenerationCall

MAX_ABORTED = 1024  # ids in one Abort
SERVER_TYPE = "vllm-grpc"  # gateways recognize the protocol by this name
Responses = AsyncGenerator[pb.GenerateResponse, None]


class VllmEngineServicer(Servicer):
    """Methods of the API. The error interceptor turns their RouterErrors into statuses."""

    def __init__(self, parts: ServiceParts) -> None:
        """Create the servicer. Raises StartupError."""
        self._parts = parts
        self._service = parts.service
        self._calls, self._feeds = LiveCalls(), CacheFeeds(self._service.watch_cache)
        self._service.watch_aborts(self._calls.abort)
        self._default_sampling = read_default_sampling(parts.config)
        self._started_at = time.monotonic()
        self._last_call_at = 0.0

    @cached_property
    def _files(self) -> TokenizerFiles:
        config = self._parts.config
        own = {
            "chat_template.jinja": config.chat_template,
            "tokenizer_config.json": config.tokenizer_config_path,
        }
        replacements = {name: Path(path) for name, path in own.items() if path}
        return TokenizerFiles((Path(config.tokenizer_path), find_model(config)), replacements)

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> Responses:
        self._last_call_at = time.time()
        call = read_call(request, context)
        name = CallName(call.tenant, call.client_id)
        writer = GenerateWriter(request, read_logprob_counts(request.sampling_params))
        results: list[Result] = []
        generate = self._stream if request.stream else self._whole
        responses = generate(call, writer, results)
        try:
            with _own_names():
                async with aclosing(self._calls.run(name, responses)) as sent:
                    async for response in sent:
                        yield response
        except AbortedError:
            for index in range(call.parameters.n):
                result = results[index] if index < len(results) else None
                if result is None or not result.is_finished:
                    yield writer.aborted(index, result)

    async def _whole(self, call: GenerationCall, writer: GenerateWriter, results: list[Result]) -> Responses:
        """Yield the message of each text, and add the results of the sent ones to `results`."""
        for index, result in enumerate(await self._service.generate(call)):
            results.append(result)
            yield writer.complete(index, result)

    async def _stream(self, call: GenerationCall, writer: GenerateWriter, results: list[Result]) -> Responses:
        """Yield the messages of a stream, and add the results of its texts to `results`."""
        async with self._service.stream(call) as streams:
            results += [Result(stream.spec) for stream in streams]
            async with aclosing(merge(streams)) as outputs:
                async for index, output in outputs:
                    result = results[index]
                    result.add(output)
                    if isinstance(output, InputTokens) or output.tokens:
                        yield writer.chunk(index, result.spec, output)
                    if result.is_finished:
                        result.input_tokens = results[0].input_tokens  # the others have none of their own
                        yield writer.complete(index, result)

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        tenant = tenant_of(context)
        if len(request.request_ids) > MAX_ABORTED:
            raise RequestError(f"request_ids must have at most {MAX_ABORTED} ids")
        # Calls without an id have no name by which they can be aborted.
        names = [CallName(tenant, each) for each in dict.fromkeys(request.request_ids) if each]
        aborted = [self._calls.abort(name) or await self._service.abort_elsewhere(name) for name in names]
        if request.request_ids and not any(aborted):
            text = "request_ids: no such request is generating"
            raise CallRefusedError(grpc.StatusCode.NOT_FOUND, text)
        return pb.AbortResponse()

    async def HealthCheck(self, request: pb.HealthCheckRequest, context: Context) -> pb.HealthCheckResponse:
        is_ready = self._parts.is_ready()
        return pb.HealthCheckResponse(healthy=is_ready, message="ready" if is_ready else "not ready")

    async def GetModelInfo(
        self, request: pb.GetModelInfoRequest, context: Context
    ) -> pb.GetModelInfoResponse:
        return read_model_info(self._parts, self._default_sampling)

    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, context: Context
    ) -> pb.GetServerInfoResponse:
        load = await self._parts.load()
        return pb.GetServerInfoResponse(
            active_requests=load.num_running + load.num_waiting,
            last_receive_timestamp=self._last_call_at,
            uptime_seconds=time.monotonic() - self._started_at,
            server_type=SERVER_TYPE,
            data_parallel_size=1,
            max_num_seqs=self._parts.config.max_batch_size,
            constrained_decoding_start="first_token",
        )

    async def GetLoads(self, request: pb.GetLoadsRequest, context: Context) -> pb.GetLoadsResponse:
        now = datetime.now(UTC).isoformat()
        load = scheduler_load(await self._parts.load(), self._parts)
        return pb.GetLoadsResponse(timestamp=now, version=version("tgis-next"), dp_rank_count=1, loads=[load])

    async def FlushCache(
        self, request: common_pb2.FlushCacheRequest, context: Context
    ) -> common_pb2.FlushCacheResponse:
        self._service.flush_cache()
        return common_pb2.FlushCacheResponse(success=True, message="no prompt is cached any more")

    async def SubscribeKvEvents(
        self, request: common_pb2.SubscribeKvEventsRequest, context: Context
    ) -> AsyncGenerator[common_pb2.KvEventBatch, None]:
        records = LoadRecords(self._parts)
        tenant = None if is_operator() else tenant_of(context)
        feed = self._feeds.subscribe(tenant, request.start_sequence_number)
        # Gateways that subscribe also ask for the health. The stream ends with a drain, which it would delay.
        with self._parts.watching() as draining, feed as subscription:
            while not draining.is_set():
                batch = await subscription.next(records.interval_s)
                if batch is not None:
                    records.follow(batch)
                    yield batch
                if (record := await records.take()) is not None:
                    yield record

    async def Embed(self, request: pb.EmbedRequest, context: Context) -> pb.EmbedResponse:
        raise _not_served("embeddings are not served")

    async def StartProfile(
        self, request: common_pb2.StartProfileRequest, context: Context
    ) -> common_pb2.ProfileResponse:
        raise _not_served("there is no profiler")

    async def StopProfile(
        self, request: common_pb2.StopProfileRequest, context: Context
    ) -> common_pb2.ProfileResponse:
        raise _not_served("there is no profiler")

    async def GetTokenizer(
        self, request: common_pb2.GetTokenizerRequest, context: Context
    ) -> AsyncGenerator[common_pb2.GetTokenizerChunk, None]:
        for chunk in split(await self._files.read()):
            yield chunk


def _not_served(reason: str) -> CallRefusedError:
    return CallRefusedError(grpc.StatusCode.UNIMPLEMENTED, reason)


@contextmanager
def _own_names() -> Iterator[None]:
    """Replace the names of parameters in refusals by this API's."""
    try:
        yield
    except RequestError as error:
        log_text = renamed_log_text(error, NAMES)
        renamed = RequestError(renamed_text(error, NAMES), error.parameter, log_text)
        renamed.is_logged = error.is_logged
        raise renamed from None
