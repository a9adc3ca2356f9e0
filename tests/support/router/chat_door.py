"""OpenAI's API of a router with a chat template, over a real socket."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai

from tests.support.http_exchange import exchange
from tests.support.router.http_door import HttpDoor, open_http_door
from tgis.router.chat.renderer import ChatRenderer
from tgis.router.chat.template import ChatTemplate

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.reasoning_content }}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}[{{ call.function.arguments.city }}]{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}{{ mood }}"
)
HELLO: Any = [{"role": "user", "content": "hello"}]


@asynccontextmanager
async def chat_door(directory: Path, **more: Any) -> AsyncIterator[tuple[HttpDoor, openai.AsyncOpenAI]]:
    renderer = ChatRenderer(ChatTemplate(TEMPLATE))
    try:
        async with open_http_door(directory, renderer, **more) as door:
            async with openai.AsyncOpenAI(base_url=f"{door.url}/v1", api_key="none", max_retries=0) as client:
                yield door, client
    finally:
        renderer.close()


async def post(door: HttpDoor, path: str, body: Any, **headers: str) -> tuple[int, Any]:
    reply = await asyncio.to_thread(exchange, door.url + path, body, headers)
    return reply.status, reply.json
