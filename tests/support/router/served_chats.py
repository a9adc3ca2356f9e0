"""OpenAI's API of a router with a chat template, over a real socket."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai

from tests.support.http_exchange import exchange
from tests.support.router.served_http import ServedHttp, open_http
from tgis.router.chat.renderer import ChatRenderer
from tgis.router.chat.template import ChatTemplate

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.reasoning_content }}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}[{{ call.function.arguments.city }}]{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}{{ mood }}"
)
HELLO: Any = [{"role": "user", "content": "hello"}]


@asynccontextmanager
async def open_chats(directory: Path, **more: Any) -> AsyncIterator[tuple[ServedHttp, openai.AsyncOpenAI]]:
    renderer = ChatRenderer(ChatTemplate(TEMPLATE))
    try:
        async with open_http(directory, renderer, **more) as served:
            async with openai.AsyncOpenAI(
                base_url=f"{served.url}/v1", api_key="none", max_retries=0
            ) as client:
                yield served, client
    finally:
        renderer.close()


async def post(served: ServedHttp, path: str, body: Any, **headers: str) -> tuple[int, Any]:
    reply = await asyncio.to_thread(exchange, served.url + path, body, headers)
    return reply.status, reply.json
