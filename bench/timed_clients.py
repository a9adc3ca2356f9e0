"""Runs gRPC clients that record the time of every message; a worker process whose argument is the address."""

import asyncio
import sys
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import grpc
import uvloop

from bench import worker
from bench.load import CHANNEL_OPTIONS
from tgis.pb import generation_pb2 as pb
from tgis.pb.generation_pb2_grpc import GenerationServiceStub

if TYPE_CHECKING:
    from tgis.pb.generation_pb2_grpc import GenerationServiceAsyncStub

MODULE = "bench.timed_clients"
TIME_LIMIT_S = 120.0
UNARY, STREAM = "unary", "stream"


@dataclass(frozen=True)
class Question:
    kind: str
    """Job of the clients: calls of one token, one after the other over one connection, or simultaneous
    streams over one connection each."""
    count: int
    new_tokens: int = 1


@dataclass(frozen=True)
class TimedStream:
    text: str
    arrivals: list[float]
    """Times of messages with new tokens, in seconds of the client's clock."""

    @property
    def pauses_s(self) -> list[float]:
        """Return the seconds between consecutive messages."""
        return [after - before for before, after in pairwise(self.arrivals)]


def ask_unary(clients: worker.Worker, count: int) -> list[float]:
    """Return the seconds of each call. Raises BenchError."""
    question = Question(UNARY, count)
    seconds: list[float] = clients.ask(asdict(question), TIME_LIMIT_S)["seconds"]
    return seconds


def ask_streams(clients: worker.Worker, count: int, new_tokens: int) -> list[TimedStream]:
    """Run the streams. Raises BenchError."""
    answer = clients.ask(asdict(Question(STREAM, count, new_tokens)), TIME_LIMIT_S)
    return [TimedStream(**stream) for stream in answer["streams"]]


async def _answer(target: str, question: Question) -> dict[str, Any]:
    async with asyncio.timeout(TIME_LIMIT_S):
        if question.kind == UNARY:
            return {"seconds": await _call_all(target, question.count)}
        streams = (_stream(target, index, question.new_tokens) for index in range(question.count))
        return {"streams": [asdict(stream) for stream in await asyncio.gather(*streams)]}


async def _call_all(target: str, count: int) -> list[float]:
    params, seconds = _params(1), []
    request = pb.BatchedGenerationRequest(requests=[pb.GenerationRequest(text="The fox")], params=params)
    async with grpc.aio.insecure_channel(target, CHANNEL_OPTIONS) as channel:
        stub: GenerationServiceAsyncStub = GenerationServiceStub(channel)
        await stub.Generate(request)
        for _ in range(count):
            begin = time.perf_counter()
            await stub.Generate(request)
            seconds.append(time.perf_counter() - begin)
    return seconds


async def _stream(target: str, index: int, new_tokens: int) -> TimedStream:
    prompt = pb.GenerationRequest(text=f"The quick brown fox {index}")
    request = pb.SingleGenerationRequest(request=prompt, params=_params(new_tokens))
    texts, arrivals, num_generated = list[str](), list[float](), 0
    async with grpc.aio.insecure_channel(target, CHANNEL_OPTIONS) as channel:
        stub: GenerationServiceAsyncStub = GenerationServiceStub(channel)
        async for message in stub.GenerateStream(request):
            texts.append(message.text)
            if message.generated_token_count:
                arrivals.append(time.perf_counter())
                num_generated = message.generated_token_count
    if num_generated != new_tokens:
        raise ValueError(f"a stream ended after {num_generated} of {new_tokens} tokens")
    return TimedStream("".join(texts), arrivals)


def _params(new_tokens: int) -> pb.Parameters:
    stopping = pb.StoppingCriteria(max_new_tokens=new_tokens, min_new_tokens=new_tokens)
    return pb.Parameters(stopping=stopping)


def main() -> None:
    [target] = sys.argv[1:]
    loop = uvloop.new_event_loop()
    worker.serve(lambda question: loop.run_until_complete(_answer(target, Question(**question))))


if __name__ == "__main__":
    main()
