"""ASGI app that `bench.http_servers` runs on each HTTP server. `python -m bench.http_server_app PORT` serves
it as this service serves its APIs."""

import asyncio
import json
import os
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

START = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]}
NUM_PARTS = 64
PART = b"data: token\n\n"
LARGE_PART = bytes(16 << 10)
BODY_S, SEND_S = 10.0, 5.0  # limits of `limited_app`
SLOW_READER_S = 5.0

counts: Counter[str] = Counter()


async def app(scope: Message, receive: Receive, send: Send) -> None:
    if scope["type"] != "http":
        raise RuntimeError("there is no lifespan")
    path = scope["path"]
    counts[f"{path} active"] += 1
    try:
        await HANDLERS[path](receive, send)
    finally:
        counts[f"{path} active"] -= 1


async def limited_app(scope: Message, receive: Receive, send: Send) -> None:
    """Limit the times of a body and of each part of a response, as an app can on any server."""
    deadline = asyncio.get_running_loop().time() + BODY_S
    is_whole = False

    async def receive_soon() -> Message:
        nonlocal is_whole
        if is_whole:
            return await receive()
        async with asyncio.timeout_at(deadline):
            message = await receive()
        is_whole = not message.get("more_body")
        return message

    async def send_soon(message: Message) -> None:
        async with asyncio.timeout(SEND_S):
            await send(message)

    await app(scope, receive_soon, send_soon)


async def report(receive: Receive, send: Send) -> None:
    await send(START)
    await send({"type": "http.response.body", "body": json.dumps({**counts, "pid": os.getpid()}).encode()})


async def stream(receive: Receive, send: Send) -> None:
    await send(START)
    for _ in range(NUM_PARTS):
        await send({"type": "http.response.body", "body": PART, "more_body": True})
        await asyncio.sleep(0)
    await send({"type": "http.response.body", "body": b""})


async def flood(receive: Receive, send: Send) -> None:
    await send(START)
    while True:
        await send({"type": "http.response.body", "body": LARGE_PART, "more_body": True})
        await asyncio.sleep(0.001)


async def upload(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        if not message.get("more_body"):
            break
    await send(START)
    await send({"type": "http.response.body", "body": b"received"})


async def wait(receive: Receive, send: Send) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


HANDLERS = {"/report": report, "/stream": stream, "/flood": flood, "/upload": upload, "/wait": wait}


async def serve(port: int) -> None:
    from starlette.applications import Starlette

    from tgis.config.processes import RouterConfig
    from tgis.net.http.routes import LimitedApp, RouteLimits
    from tgis.net.http.server import serve_http

    limits = RouteLimits(answer_s=None, max_connections=256)
    config = RouterConfig(tokenizer_path="", bind="127.0.0.1", port=port, slow_reader_timeout=SLOW_READER_S)
    starlette = Starlette(routes=[LimitedApp(app, lambda path: True, limits)])  # type: ignore[arg-type]
    async with serve_http(starlette, config, None):
        await asyncio.Event().wait()


if __name__ == "__main__":
    import uvloop

    uvloop.run(serve(int(sys.argv[1])))
