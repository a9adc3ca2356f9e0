"""Clients of OpenAI's API that send a request each at the same time, over one connection per client, and
stream the response; a worker process whose argument is the server's address. It needs only the standard
library."""

import asyncio
import json
import random
import sys
import time
from typing import Any

from bench import worker

MODULE = "bench.http_burst"
FIRST_ID = 2
TIME_LIMIT_S = 300.0
CHUNK_BYTES = 1 << 16


async def burst(target: str, vocab_size: int, question: dict[str, Any]) -> dict[str, Any]:
    """Return the seconds until all responses are complete. Raises ValueError for an incomplete one."""
    source, new_tokens = random.Random(question["seed"]), question["new_tokens"]
    ids = range(FIRST_ID, vocab_size)
    prompts = [source.choices(ids, k=question["input_tokens"]) for _ in range(question["batch"])]
    host, _, port = target.rpartition(":")
    links = [await asyncio.open_connection(host, int(port)) for _ in prompts]
    start = time.perf_counter()
    async with asyncio.timeout(TIME_LIMIT_S):
        await asyncio.gather(
            *(_ask(*link, prompt, new_tokens) for link, prompt in zip(links, prompts, strict=True))
        )
    return {"seconds": time.perf_counter() - start}


async def _ask(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, prompt: list[int], new_tokens: int
) -> None:
    writer.write(make_request(prompt, new_tokens))
    received = bytearray()
    while data := await reader.read(CHUNK_BYTES):
        received += data
    writer.close()
    if (num_tokens := count_tokens(received)) != new_tokens:
        raise ValueError(f"an answer of {num_tokens} tokens: {bytes(received[-300:])!r}")


def make_request(prompt: list[int], new_tokens: int) -> bytes:
    settings = {"temperature": 0, "max_tokens": new_tokens, "min_tokens": new_tokens, "ignore_eos": True}
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    body = json.dumps({"prompt": prompt} | settings | streamed).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
    return head.encode() + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body


def count_tokens(received: bytes) -> int:
    """Return the number of tokens in the last event with usage; -1 if there is none."""
    events = [line[6:] for line in received.splitlines() if line.startswith(b"data: {")]
    usages = [usage for event in events if b'"usage"' in event and (usage := json.loads(event)["usage"])]
    return int(usages[-1]["completion_tokens"]) if usages else -1


def serve(target: str, vocab_size: int) -> None:
    loop = asyncio.new_event_loop()
    worker.serve(lambda question: loop.run_until_complete(burst(target, vocab_size, question)))


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
