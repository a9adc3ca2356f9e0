"""Streaming clients of every API, with one connection per stream; a worker process whose arguments are the
addresses of the gRPC and HTTP ports. They parse only the last messages: `tgis.load` needs more CPU time for a
token than the router whose limit is measured with them, and would be the bottleneck."""

import asyncio
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
import uvloop
from smg_grpc_proto.generated import vllm_engine_pb2 as engine_pb

from bench import worker
from tgis.load.apis.fmaas import CHANNEL_OPTIONS
from tgis.pb import generation_pb2 as pb

MODULE = "bench.api_clients"
GRPC, ENGINE = "grpc", "engine"
COMPLETIONS, CHAT, TOOLS, TGI, LMI = "completions", "chat", "tools", "tgi", "lmi"
APIS = (GRPC, ENGINE, COMPLETIONS, CHAT, TOOLS, TGI, LMI)
METHOD = "/fmaas.GenerationService/GenerateStream"
ENGINE_METHOD = "/vllm.grpc.engine.VllmEngine/Generate"
TEXT = "The quick brown fox"
TIME_LIMIT_S = 120.0
MESSAGES = [{"role": "user", "content": TEXT}]
Fields = dict[str, Any]
Question = dict[str, Any]


@dataclass(frozen=True)
class Wire:
    """Request of a stream over HTTP in one API, and how a complete stream is recognized."""

    path: str
    make_body: Callable[[int], Fields]
    """Function from the number of new tokens to the body."""
    event: bytes = b"data: {"
    """Prefix of each event."""
    last: bytes = b"data: [DONE]\n\n"
    """Text near the end of a complete stream, and nowhere else."""


def _openai(**fields: Any) -> Callable[[int], Fields]:
    settings = {"stream": True, "temperature": 0, "ignore_eos": True}
    return lambda new_tokens: fields | settings | {"max_tokens": new_tokens}


def _inputs(stream: bool | None, **parameters: Any) -> Callable[[int], Fields]:
    """Return a function that builds bodies of TGI's or LMI's API."""
    return lambda new_tokens: {
        "inputs": TEXT,
        "parameters": {"max_new_tokens": new_tokens, "details": True, "do_sample": False, **parameters},
        "stream": stream,
    }


WIRES = {
    COMPLETIONS: Wire("/v1/completions", _openai(prompt=TEXT)),
    CHAT: Wire("/v1/chat/completions", _openai(messages=MESSAGES)),
    TOOLS: Wire("/v1/chat/completions", _openai(messages=MESSAGES, tools=[{"function": {"name": "look"}}])),
    TGI: Wire("/generate_stream", _inputs(None), last=b'"finish_reason":"length"'),
    LMI: Wire(
        "/invocations", _inputs(True, ignore_eos_token=True), b'{"token":', b'"finish_reason":"length"'
    ),
}


async def stream_all(grpc_target: str, http_target: str, question: Question) -> dict[str, Any]:
    """Open all streams at once, and return the number of messages or events received. Raises ValueError if a
    stream is incomplete."""
    count, new_tokens = question["streams"], question["new_tokens"]
    if question["api"] == GRPC:
        streams = [_stream_grpc(grpc_target, new_tokens) for _ in range(count)]
    elif question["api"] == ENGINE:
        streams = [_stream_engine(grpc_target, new_tokens) for _ in range(count)]
    else:
        wire = WIRES[question["api"]]
        request = make_request(wire, new_tokens)
        streams = [_stream_http(http_target, wire, request) for _ in range(count)]
    async with asyncio.timeout(TIME_LIMIT_S):
        return {"events": sum(await asyncio.gather(*streams))}


async def _stream_grpc(target: str, new_tokens: int) -> int:
    params = pb.Parameters(stopping=pb.StoppingCriteria(max_new_tokens=new_tokens, min_new_tokens=new_tokens))
    request = pb.SingleGenerationRequest(request=pb.GenerationRequest(text=TEXT), params=params)
    num_messages, last_message = await _call_grpc(target, METHOD, request)
    last = pb.GenerationResponse.FromString(last_message)
    if last.generated_token_count != new_tokens:
        raise ValueError(f"a stream ended with {last}")
    return num_messages


async def _stream_engine(target: str, new_tokens: int) -> int:
    sampling = engine_pb.SamplingParams(max_tokens=new_tokens, ignore_eos=True, temperature=0)
    request = engine_pb.GenerateRequest(text=TEXT, stream=True, sampling_params=sampling)
    num_messages, last_message = await _call_grpc(target, ENGINE_METHOD, request)
    last = engine_pb.GenerateResponse.FromString(last_message)
    if last.complete.completion_tokens != new_tokens:
        raise ValueError(f"a stream ended with {last}")
    return num_messages


async def _call_grpc(target: str, method: str, request: Any) -> tuple[int, bytes]:
    """Return the number of messages of a stream, and the last one."""
    num_messages, last_message = 0, b""
    async with grpc.aio.insecure_channel(target, CHANNEL_OPTIONS) as channel:
        async for message in channel.unary_stream(method)(request.SerializeToString()):
            num_messages, last_message = num_messages + 1, message
    return num_messages, last_message


def make_request(wire: Wire, new_tokens: int) -> bytes:
    text = json.dumps(wire.make_body(new_tokens)).encode()
    head = f"POST {wire.path} HTTP/1.1\r\nhost: bench\r\nconnection: close\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(text)}\r\n\r\n"
    return head.encode() + text


async def _stream_http(target: str, wire: Wire, request: bytes) -> int:
    host, _, port = target.rpartition(":")
    loop = asyncio.get_running_loop()
    _, reader = await loop.create_connection(lambda: _Reader(wire, request), host, int(port))
    await reader.ended
    if wire.last not in reader.last:
        raise ValueError(f"a stream ended with {reader.last!r}")
    return reader.num_events


class _Reader(asyncio.Protocol):
    """Connection of one stream over HTTP, whose events are counted."""

    def __init__(self, wire: Wire, request: bytes) -> None:
        self.num_events, self.last = 0, b""
        self.ended = asyncio.get_running_loop().create_future()
        self._event, self._request = wire.event, request

    def connection_made(self, transport: Any) -> None:
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        kept = self.last[-len(self._event) + 1 :]  # an event's prefix may be split over two reads
        self.num_events += (kept + data).count(self._event)
        self.last = (self.last + data)[-200:]

    def connection_lost(self, error: Exception | None) -> None:
        self.ended.set_result(None)


def main() -> None:
    grpc_target, http_target = sys.argv[1:]
    loop = uvloop.new_event_loop()
    worker.serve(lambda question: loop.run_until_complete(stream_all(grpc_target, http_target, question)))


if __name__ == "__main__":
    main()
