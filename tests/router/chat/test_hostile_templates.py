"""Check that templates which loop, allocate or try to leave their sandbox cost one short refusal."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import closing
from typing import Any

import pytest

from tests.support.worker_processes import children, memory_bytes
from tgis.router.chat import renderer as chat_renderer
from tgis.router.chat.limits import MAX_PROMPT_BYTES, MEMORY_BYTES, NUM_WORKERS
from tgis.router.chat.renderer import Chat, ChatRenderer
from tgis.router.chat.template import WORKER, ChatTemplate
from tgis.router.errors import RequestError, UnavailableError

LOOP = "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}"
TOO_SLOW, TOO_MUCH = "the chat template takes too long", "the chat template needs too much memory"
TOO_LONG = f"the chat template makes a prompt of more than {MAX_PROMPT_BYTES} bytes"
TOO_DEEP = "the chat, or what the chat template does with it, is nested too deeply"
FORBIDDEN = "the chat template does what its sandbox forbids in line 1"
HOSTILE = {
    "{{ 'x' * 10**9 }}": TOO_MUCH,
    "{{ [1] * 10**9 }}": TOO_MUCH,
    "{{ '%999999999d' | format(1) }}": TOO_MUCH,
    "{{ 'x' | center(999999999) }}": TOO_MUCH,
    "{% set ns = namespace(s='x') %}{% for i in [1] * 40 %}{% set ns.s = ns.s * 2 %}{% endfor %}": TOO_MUCH,
    "{{ 'x' * 5 * 10**6 }}": TOO_LONG,
    "{% for i in range(99999) %}{{ 'é' * 99 }}{% endfor %}": TOO_LONG,
    "{{ range(10**9) | list }}": "the chat template failed with OverflowError in line 1",
    "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}": TOO_DEEP,
    "{% set a = [] %}{{ a.append(a) }}": FORBIDDEN,
    "{{ ''.__class__.__mro__ }}": FORBIDDEN,
    "{{ ''['__class__'].__mro__ }}": FORBIDDEN,
    "{{ (messages | attr('__class__')).__mro__ }}": FORBIDDEN,
    "{{ '{0.__class__.__mro__}'.format(1) }}": FORBIDDEN,
    "{{ raise_exception.__globals__.sys }}": FORBIDDEN,
    "{{ cycler.__init__.__globals__.sys }}": FORBIDDEN,
    "{{ namespace(__class__=1) }}": FORBIDDEN,
    "{% set ns = namespace() %}{% set ns._x = 1 %}": FORBIDDEN,
    "{{ dict.mro() }}": "the chat template failed with UndefinedError in line 1",
    "{% include '/etc/passwd' %}": "the chat template failed with TypeError in line 1",
    "{{ '\ud800' }}": "the chat has a text that is not valid Unicode",
}
WELL = ChatTemplate("{{ messages[0].content }}")


def chat_of(content: Any) -> Chat:
    return Chat([{"role": "user", "content": content}])


@pytest.fixture
async def renderer() -> AsyncIterator[ChatRenderer]:
    renderer = ChatRenderer(WELL)
    yield renderer
    renderer.close()


async def ask_template(renderer: ChatRenderer, text: str) -> str:
    """Make the workers of a renderer render another template."""
    renderer._template = ChatTemplate(text)
    try:
        return await renderer.render(chat_of("é"))
    finally:
        renderer._template = WELL


async def test_hostile_templates_are_refused_and_the_next_is_served(renderer: ChatRenderer) -> None:
    for text, expected in HOSTILE.items():
        with pytest.raises(RequestError) as caught:
            await ask_template(renderer, text)
        assert str(caught.value) == expected, text
        assert await renderer.render(chat_of("é")) == "é"


async def test_a_loop_is_stopped_after_a_second_and_blocks_no_other_chat(renderer: ChatRenderer) -> None:
    slow = asyncio.create_task(ask_template(renderer, LOOP))
    await asyncio.sleep(0.05)
    renderer._template = WELL
    num_rendered = 0
    while not slow.done():
        assert await renderer.render(chat_of("b")) == "b"
        num_rendered += not slow.done()
        await asyncio.sleep(0.05)
    with pytest.raises(RequestError, match=f"^{TOO_SLOW}$"):
        await slow
    assert num_rendered > 0


async def test_hostile_chats(renderer: ChatRenderer) -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(RequestError, match=r"^the chat is nested too deeply, or has a number out of range$"):
        await renderer.render(chat_of(deep))
    shallow: list[Any] = []
    for _ in range(900):
        shallow = [shallow]
    assert await renderer.render(chat_of(shallow)) == str(shallow)
    with pytest.raises(RequestError, match=r"^the chat is nested too deeply, or has a number out of range$"):
        await renderer.render(chat_of(10**5000))
    with pytest.raises(RequestError, match=f"^{TOO_LONG}$"):
        await renderer.render(chat_of("é" * MAX_PROMPT_BYTES))
    longest = "\x00" * (MAX_PROMPT_BYTES - 1)
    assert await renderer.render(chat_of(longest)) == longest
    many = [{"role": "user", "content": "x"} for _ in range(50_000)]
    assert await renderer.render(Chat(many)) == "x"


async def test_a_killed_process_is_replaced_and_none_is_left_behind() -> None:
    renderer = ChatRenderer(WELL)
    assert list(children(WORKER)) == [], "none before it is needed"
    for number in (signal.SIGKILL, signal.SIGTERM):
        await renderer.render(chat_of("a"))
        [child] = children(WORKER)
        os.kill(child, number)
        assert await renderer.render(chat_of("b")) == "b"
        [other] = children(WORKER)
        assert other != child
    await asyncio.gather(*(renderer.render(chat_of("c")) for _ in range(20)))
    assert 1 <= len(list(children(WORKER))) <= NUM_WORKERS
    busy = asyncio.create_task(ask_template(renderer, LOOP))
    await asyncio.sleep(0.2)
    renderer.close()
    assert list(children(WORKER)) == []
    with pytest.raises(RequestError):
        await busy
    assert list(children(WORKER)) == []


async def test_memory_is_bounded_over_many_chats(renderer: ChatRenderer) -> None:
    large = chat_of("é" * 100_000)
    await renderer.render(large)
    [child] = children(WORKER)
    before = memory_bytes(child)
    for i in range(100):
        assert (await renderer.render(large)).startswith("é")
        assert await ask_template(renderer, f"{{{{ {i} }}}}") == str(i)
    assert list(children(WORKER)) == [child]
    assert memory_bytes(child) < before + (8 << 20)
    assert memory_bytes(child) < MEMORY_BYTES


async def test_a_worker_gives_up_within_its_memory(renderer: ChatRenderer) -> None:
    text = "{{ messages | tojson }}" * 20
    content = json.dumps(["é" * 100] * 20_000)
    renderer._template = ChatTemplate(text)
    with pytest.raises(RequestError, match=f"^({TOO_MUCH}|{TOO_LONG})$"):
        await renderer.render(chat_of(content))


async def render_at_last(renderer: ChatRenderer, content: str) -> str:
    """Try again while the machine is too busy."""
    for _ in range(20):
        try:
            return await renderer.render(chat_of(content))
        except UnavailableError:
            continue
    raise AssertionError("it is always busy")


async def test_a_worker_without_cpu_time_refuses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_renderer, "TIMEOUT_S", 2.0)
    with closing(ChatRenderer(WELL)) as renderer:
        assert await render_at_last(renderer, "a") == "a"
        [child] = children(WORKER)
        os.kill(child, signal.SIGSTOP)
        with pytest.raises(UnavailableError, match=r"^the chat was not rendered in time, because"):
            await renderer.render(chat_of("b"))
        assert await render_at_last(renderer, "b") == "b"
        assert child not in children(WORKER)
