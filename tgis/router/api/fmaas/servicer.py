"""Implements `fmaas.GenerationService`: translates between its messages and the service."""

from collections.abc import AsyncGenerator

from tgis.pb import generation_pb2 as pb
from tgis.pb.generation_pb2_grpc import GenerationServiceServicer
from tgis.router.api.fmaas.call_metadata import CallMetadata, read_metadata
from tgis.router.api.fmaas.messages import CallSource, ResponseWriter, read_batch, read_single
from tgis.router.api.fmaas.rules import FMAAS
from tgis.router.api.fmaas.trailing_metadata import CallEnd, trailing_metadata
from tgis.router.api.grpc.call_status import Context
from tgis.router.api.service import GenerationService, Result
from tgis.router.api.tenants import tenant_of
from tgis.router.events import Output
from tgis.router.text.tokenization import TokenizeOptions, tokenize_job
from tgis.router.text.tokenizer import Tokenizer


class GenerationServicer(GenerationServiceServicer):
    """Methods of the public service. The error interceptor turns their RouterErrors into statuses."""

    def __init__(self, service: GenerationService, tokenizer: Tokenizer) -> None:
        self._service = service
        self._writer = ResponseWriter(tokenizer.piece)
        self._id_writer = ResponseWriter(str)

    async def Generate(
        self, request: pb.BatchedGenerationRequest, context: Context
    ) -> pb.BatchedGenerationResponse:
        source = _read_source(context)
        results = await self._service.generate(read_batch(request, source))
        context.set_trailing_metadata(trailing_metadata(map(_end, results)))
        return self._writer_for(source.metadata).batch(request, results, self._service.is_encoder_decoder)

    async def GenerateStream(  # type: ignore[override]
        self, request: pb.SingleGenerationRequest, context: Context
    ) -> AsyncGenerator[pb.GenerationResponse | bytes, None]:
        source = _read_source(context)
        writer = self._writer_for(source.metadata)
        async with self._service.stream(read_single(request, source)) as ((spec, outputs),):
            yield writer.header(request, spec)
            async for output in outputs:
                response = writer.message(output, spec)
                if response is not None:
                    yield response
            assert isinstance(output, Output), "a generation ends with an output"
            context.set_trailing_metadata(trailing_metadata([CallEnd(spec, output)]))

    async def Tokenize(  # type: ignore[override]
        self, request: pb.BatchedTokenizeRequest, context: Context
    ) -> bytes:
        metadata = _metadata(context)
        options = TokenizeOptions(metadata.inputs_are_ids, metadata.tokens_are_ids)
        return await self._service.tokenize(
            tokenize_job(request, options), FMAAS, metadata.headers, context.peer(), metadata.refusal
        )

    async def ModelInfo(self, request: pb.ModelInfoRequest, context: Context) -> pb.ModelInfoResponse:
        metadata = _metadata(context)
        kinds = pb.ModelInfoResponse
        info = self._service.model_info(FMAAS, metadata.headers, metadata.refusal)
        return pb.ModelInfoResponse(
            model_kind=kinds.ENCODER_DECODER if info.is_encoder_decoder else kinds.DECODER_ONLY,
            max_sequence_length=info.max_sequence_length,
            max_new_tokens=info.max_new_tokens,
        )

    def _writer_for(self, metadata: CallMetadata) -> ResponseWriter:
        return self._id_writer if metadata.tokens_are_ids else self._writer


def _end(result: Result) -> CallEnd:
    assert result.last is not None, "a generation ends with an output"
    return CallEnd(result.spec, result.last)


def _read_source(context: Context) -> CallSource:
    return CallSource(_metadata(context), context.peer(), tenant_of(context), context.time_remaining())


def _metadata(context: Context) -> CallMetadata:
    return read_metadata(context.invocation_metadata() or ())
