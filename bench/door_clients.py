"""Clients of every API that stream, each over a connection of its own; a worker process whose arguments are
the addresses of the gRPC and of the HTTP port. They count and decode nothing, so that they limit nothing."""

import asyncio
import json
import sys
from typing import Any

import grpc

from bench import worker
from bench.load import CHANNEL_OPTIONS
from tgis.pb import generation_pb2 as pb

MODULE = "bench.door_clients"
GRPC, COMPLETIONS, CHAT, TOOLS = "grpc", "completions", "chat", "tools"
APIS = (GRPC, COMPLETIONS, CHAT, TOOLS)
METHOD = "/fmaas.GenerationService/GenerateStream"
TEXT = "The quick brown fox"
TIME_LIMIT_S = 120.0
CHUNK_BYTES = 1 << 16
EVENT, LAST_EVENT = b"data: {", b"data: [DONE]\n\n"
MESSAGES = [{"role": "user", "content": TEXT}]
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    COMPLETIONS: ("/v1/completions", {"prompt": TEXT}),
    CHAT: ("/v1/chat/completions", {"messages": MESSAGES}),
    TOOLS: ("/v1/chat/completions", {"messages": MESSAGES, "tools": [{"function": {"name": "look"}}]}),
}
SETTINGS = {"stream": True, "temperature": 0, "ignore_eos": True}
Question = dict[str, Any]


async def stream_all(grpc_target: str, http_target: str, question: Question) -> dict[str, Any]:
    """Open all streams at once; return the number of messages or events that came. Raises ValueError if a
    stream breaks off."""
    count, new_tokens = question["streams"], question["new_tokens"]
    if question["api"] == GRPC:
        streams = [_stream_grpc(grpc_target, new_tokens) for _ in range(count)]
    else:
        request = make_request(question["api"], new_tokens)
        streams = [_stream_http(http_target, request) for _ in range(count)]
    async with asyncio.timeout(TIME_LIMIT_S):
        return {"events": sum(await asyncio.gather(*streams))}


async def _stream_grpc(target: str, new_tokens: int) -> int:
    params = pb.Parameters(stopping=pb.StoppingCriteria(max_new_tokens=new_tokens, min_new_tokens=new_tokens))
    request = pb.SingleGenerationRequest(request=pb.GenerationRequest(text=TEXT), params=params)
    async with grpc.aio.insecure_channel(target, CHANNEL_OPTIONS) as channel:
        num_messages = 0
        async for _ in channel.unary_stream(METHOD)(request.SerializeToString()):
            num_messages += 1
        return num_messages


def make_request(api: str, new_tokens: int) -> bytes:
    path, body = BODIES[api]
    text = json.dumps(body | SETTINGS | {"max_tokens": new_tokens}).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\nconnection: close\r\n"
    return head.encode() + b"content-length: %d\r\n\r\n" % len(text) + text


async def _stream_http(target: str, request: bytes) -> int:
    host, _, port = target.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request)
    num_events, last = 0, b""
    while data := await reader.read(CHUNK_BYTES):
        kept = last[-len(EVENT) + 1 :]  # an event's beginning may lie in two reads
        num_events += (kept + data).count(EVENT)
        last = (last + data)[-200:]
    writer.close()
    if LAST_EVENT not in last:
        raise ValueError(f"a stream ended with {last!r}")
    return num_events


def main() -> None:
    grpc_target, http_target = sys.argv[1:]
    loop = asyncio.new_event_loop()
    worker.serve(lambda question: loop.run_until_complete(stream_all(grpc_target, http_target, question)))


if __name__ == "__main__":
    main()
