"""Implements `fmaas.GenerationService`, TGIS's calls: translates messages for the service of all doors."""

from collections.abc import AsyncGenerator
from typing import Any

import grpc

from tgis.pb import generation_pb2 as pb
from tgis.pb.generation_pb2_grpc import GenerationServiceServicer
from tgis.router.api.grpc.messages import ResponseWriter, read_batch, read_single
from tgis.router.api.service import GenerationService
from tgis.router.requests.call import Metadata

Context = grpc.aio.ServicerContext[Any, Any]


class GenerationServicer(GenerationServiceServicer):
    """Methods of the public service. The error interceptor turns their RouterErrors into statuses."""

    def __init__(self, service: GenerationService, writer: ResponseWriter) -> None:
        self._service, self._writer = service, writer

    async def Generate(
        self, request: pb.BatchedGenerationRequest, context: Context
    ) -> pb.BatchedGenerationResponse:
        results = await self._service.generate(read_batch(request, _metadata(context), context.peer()))
        return self._writer.batch(request, results, self._service.is_encoder_decoder)

    async def GenerateStream(
        self, request: pb.SingleGenerationRequest, context: Context
    ) -> AsyncGenerator[pb.GenerationResponse, None]:
        call = read_single(request, _metadata(context), context.peer())
        async with self._service.stream(call) as (spec, outputs):
            yield self._writer.header(request, spec)
            async for output in outputs:
                response = self._writer.message(output, spec)
                if response is not None:
                    yield response

    async def Tokenize(  # type: ignore[override]
        self, request: pb.BatchedTokenizeRequest, context: Context
    ) -> bytes:
        return await self._service.tokenize(request, _metadata(context), context.peer())

    async def ModelInfo(self, request: pb.ModelInfoRequest, context: Context) -> pb.ModelInfoResponse:
        info, kinds = self._service.model_info(_metadata(context)), pb.ModelInfoResponse
        return pb.ModelInfoResponse(
            model_kind=kinds.ENCODER_DECODER if info.is_encoder_decoder else kinds.DECODER_ONLY,
            max_sequence_length=info.max_sequence_length,
            max_new_tokens=info.max_new_tokens,
        )


def _metadata(context: Context) -> Metadata:
    return context.invocation_metadata() or ()
