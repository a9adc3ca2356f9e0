"""GenerationService with fixed answers on a real port, for tests of its clients."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from tgis.pb import generation_pb2 as pb
from tgis.pb.generation_pb2_grpc import GenerationServiceServicer, add_GenerationServiceServicer_to_server

WORDS = ("one", " two", " three")


@dataclass
class CannedService(GenerationServiceServicer):
    """Service that answers every request with the words of three numbers. It rejects the text `fail`, in a
    stream after the first word."""

    delay: float = 0.0
    """Delay in seconds before each word of a stream and before a unary answer."""
    asked: list[Any] = field(default_factory=list)
    """All requests in order of arrival."""
    metadata: list[dict[str, str | bytes]] = field(default_factory=list)
    """Metadata of each request."""
    trailers: tuple[tuple[str, str], ...] = ()
    """Trailing metadata of each answer."""

    def Generate(self, request: Any, context: Any) -> pb.BatchedGenerationResponse:
        self._note(request, context)
        time.sleep(self.delay)
        if any(each.text == "fail" for each in request.requests):
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "input refused\nin two lines")
        answers = [_answer(each.text, request.params) for each in request.requests]
        return pb.BatchedGenerationResponse(responses=answers)

    def GenerateStream(self, request: Any, context: Any) -> Iterator[pb.GenerationResponse]:
        self._note(request, context)
        yield pb.GenerationResponse(input_token_count=4, seed=7)
        for index, word in enumerate(WORDS):
            time.sleep(self.delay)
            if index and request.request.text == "fail":
                context.abort(grpc.StatusCode.UNAVAILABLE, "worker lost")
            last = index + 1 == len(WORDS)
            yield pb.GenerationResponse(
                text=word,
                generated_token_count=index + 1,
                stop_reason=pb.MAX_TOKENS if last else pb.NOT_FINISHED,
                tokens=[_token(word, index)] if request.params.response.generated_tokens else [],
            )

    def Tokenize(self, request: Any, context: Any) -> pb.BatchedTokenizeResponse:
        self._note(request, context)
        responses = [_tokenize(each.text, request.return_offsets) for each in request.requests]
        return pb.BatchedTokenizeResponse(responses=responses)

    def ModelInfo(self, request: Any, context: Any) -> pb.ModelInfoResponse:
        self._note(request, context)
        return pb.ModelInfoResponse(max_sequence_length=512, max_new_tokens=128)

    def _note(self, request: Any, context: Any) -> None:
        self.asked.append(request)
        pairs = context.invocation_metadata()
        self.metadata.append(dict(pairs))
        assert len(self.metadata[-1]) == len(pairs), "no key is given twice"
        context.set_trailing_metadata(self.trailers)


@contextmanager
def serve(
    service: CannedService, credentials: grpc.ServerCredentials | None = None, workers: int = 8
) -> Iterator[str]:
    """Yield `localhost:PORT`, which is open within the context."""
    server = grpc.server(ThreadPoolExecutor(workers))
    add_GenerationServiceServicer_to_server(service, server)
    address = "localhost:0"
    port = server.add_secure_port(address, credentials) if credentials else server.add_insecure_port(address)
    server.start()
    try:
        yield f"localhost:{port}"
    finally:
        server.stop(None).wait()


def _answer(text: str, params: pb.Parameters) -> pb.GenerationResponse:
    wanted = params.response.generated_tokens
    return pb.GenerationResponse(
        text=f"{text}: {''.join(WORDS)}",
        input_token_count=4,
        generated_token_count=len(WORDS),
        stop_reason=pb.MAX_TOKENS,
        tokens=[_token(word, index) for index, word in enumerate(WORDS)] if wanted else [],
    )


def _token(word: str, index: int) -> pb.TokenInfo:
    rivals = [pb.TokenInfo.TopToken(text=word, logprob=-0.5), pb.TokenInfo.TopToken(text="\n", logprob=-2.25)]
    return pb.TokenInfo(text=word, logprob=-0.5 * (index + 1), rank=index + 1, top_tokens=rivals)


def _tokenize(text: str, offsets_wanted: bool) -> pb.TokenizeResponse:
    """Tokenize the text by characters."""
    ends = [len(text[: index + 1].encode()) for index in range(len(text))]
    offsets = [pb.TokenizeResponse.Offset(start=start, end=end) for start, end in zip([0, *ends], ends)]  # noqa: B905
    return pb.TokenizeResponse(
        token_count=len(text), tokens=list(text), offsets=offsets if offsets_wanted else []
    )
