"""Check rendered chats against transformers, for templates in the style of published families."""

import asyncio
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Hashable
from typing import Any

import pytest

from tests.support.chats import FAMILIES, SPECIAL_TOKENS, Reference, random_chats, template_text
from tgis.process import worker_pool
from tgis.process.fair_queue import FairQueue
from tgis.router.chat.renderer import NO_TEMPLATE, Chat, ChatRenderer
from tgis.router.chat.template import ChatTemplate
from tgis.router.errors import OverloadedError, RequestError
from tgis.router.metrics.metrics import MetricLimits, Metrics

Make = Callable[..., ChatRenderer]
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    made: list[ChatRenderer] = []

    def make(text: str, **more: str | bool) -> ChatRenderer:
        template = ChatTemplate(text, special_tokens=SPECIAL_TOKENS, **more)  # type: ignore[arg-type]
        made.append(ChatRenderer(template))
        return made[-1]

    yield make
    for renderer in made:
        renderer.close()


async def prompt_or_none(renderer: ChatRenderer, chat: Chat) -> str | None:
    try:
        return await renderer.render(chat)
    except RequestError:
        return None


async def check_family(family: str, make: Make, seed: int, count: int) -> None:
    reference, renderer = Reference(template_text(family)), make(template_text(family))
    kinds = Counter[tuple[bool, bool]]()
    for chat in random_chats(seed, count):
        expected = reference.render(chat)
        actual = await prompt_or_none(renderer, chat)
        assert actual == expected, chat
        kinds[chat.continue_final_message, actual is not None] += 1
    assert kinds[False, True] > count / 5, "most chats must be rendered, for the test to see something"
    assert kinds[True, True] > count / 20


@pytest.mark.parametrize("family", FAMILIES)
async def test_chats_are_rendered_as_by_transformers(family: str, make: Make) -> None:
    await check_family(family, make, seed=1, count=20)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
async def test_many_chats_are_rendered_as_by_transformers(family: str, make: Make) -> None:
    await check_family(family, make, seed=2, count=3000)


@pytest.mark.parametrize("ending", ["", " ", "\n", " x \n"])
async def test_content_parts_are_continued_as_by_transformers(ending: str, make: Make) -> None:
    text = template_text("content_parts")
    parts = [{"type": "text", "text": "One."}, {"type": "text", "text": "Two" + ending}, {"type": "image"}]
    messages = [*HELLO, {"role": "assistant", "content": parts}]
    chat = Chat(messages, add_generation_prompt=False, continue_final_message=True)
    result = await make(text).render(chat)
    assert result == Reference(text).render(chat)
    assert result.endswith("One.Two" + ending)


async def test_a_text_to_continue_must_occur(make: Make) -> None:
    for text in ("nothing", "{{ messages[-1].content | upper }}", "{{ messages[-1].content | tojson }}"):
        chat = Chat([{"role": "assistant", "content": 'a"b'}], None, None, False, True)
        with pytest.raises(RequestError, match=r"^the chat template omits or changes the text"):
            await make(text).render(chat)
    for message in ({"role": "assistant"}, {"role": "assistant", "content": None}):
        with pytest.raises(RequestError, match=r"^the last message has no text to continue"):
            await make("{{ messages[-1].content }}").render(Chat([message], None, None, False, True))


async def test_a_client_cannot_forge_where_a_prompt_ends(make: Make) -> None:
    text = "CONTINUE_FINAL_MESSAGE_TAG and more"
    chat = Chat([{"role": "assistant", "content": text}], None, None, False, True)
    assert await make("{{ messages[-1].content }}</s>{{ messages[-1].content }}").render(chat) != ""
    assert await make("{{ messages[-1].content }}</s>").render(chat) == text


async def test_unsupported_requests_are_refused(make: Make) -> None:
    renderer = make("{{ messages[0].content }}")
    chats = {
        "messages must not be empty": Chat([]),
        "add_generation_prompt and continue_final_message must not both be true": Chat(
            HELLO, continue_final_message=True
        ),
        "chat_template_kwargs must not have tools": Chat(HELLO, variables={"tools": []}),
    }
    for text, chat in chats.items():
        with pytest.raises(RequestError, match=f"^{text}$"):
            await renderer.render(chat)
    with pytest.raises(RequestError) as caught:
        await ChatRenderer(None).render(Chat(HELLO))
    assert str(caught.value) == NO_TEMPLATE


async def test_a_refusal_of_the_template_reaches_the_client_alone(make: Make) -> None:
    text = "{{ raise_exception(messages[0].content) }}"
    message = {"role": "user", "content": "se\ncret\x1b[0m " + "x" * 5000}
    with pytest.raises(RequestError) as caught:
        await make(text).render(Chat([message]))
    assert str(caught.value).startswith("the chat template refuses the chat: se cret [0m xxx")
    assert len(str(caught.value)) < 400
    assert caught.value.log_text == "the chat template refuses the chat"


async def test_an_error_gives_its_line_and_nothing_of_the_chat(make: Make) -> None:
    text = "a\n{% if true %}\n{{ messages[0][messages[0].content].more }}{% endif %}"
    with pytest.raises(RequestError) as caught:
        await make(text).render(Chat([{"role": "user", "content": "secret"}]))
    assert str(caught.value) == "the chat template failed with UndefinedError in line 3"


async def test_the_template_for_tools_and_variables(make: Make) -> None:
    renderer = make("plain {{ bos_token }}{{ x }}", tool_use="tools {{ eos_token }}")
    assert await renderer.render(Chat(HELLO)) == "plain <s>"
    assert await renderer.render(Chat(HELLO, variables={"x": "!", "bos_token": "B"})) == "plain B!"
    assert await renderer.render(Chat(HELLO, tools=[])) == "tools </s>"


def test_the_router_does_not_import_the_template_language() -> None:
    code = "import sys, tgis.router.chat.renderer; sys.exit('jinja2' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


async def test_failures_and_times_are_counted() -> None:
    metrics = Metrics(MetricLimits(64, 32, 4))
    fine, killed = "{{ messages[0].content }}", "{{ 'x' * 10**9 }}"
    for text in (fine, "{{ raise_exception('no') }}", "{{ 1 / 0 }}", killed):
        renderer = ChatRenderer(ChatTemplate(text), metrics=metrics)
        await prompt_or_none(renderer, Chat(HELLO))
        renderer.close()
    exposition = metrics.render().decode()
    assert {
        line for line in exposition.splitlines() if line.startswith("tgi_chat_template_failure_total")
    } == {
        'tgi_chat_template_failure_total{err="killed"} 1.0',
        'tgi_chat_template_failure_total{err="template"} 2.0',
    }
    assert "tgi_chat_template_duration_count 4.0\n" in exposition


class RecordedQueue(FairQueue[Any]):
    """Queue that records how many requests others began while each request waited."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__(max_bytes)
        self.owners: list[Hashable] = []
        """Owners of the begun requests, in order."""
        self.delays: dict[Hashable, list[int]] = {}
        """Numbers of requests of others that were begun before each request of an owner."""
        self._pushed: dict[int, tuple[Hashable, int]] = {}

    def push(self, owner: Hashable, item: Any, num_bytes: int) -> list[Any]:
        self._pushed[id(item)] = owner, len(self.owners)
        return super().push(owner, item, num_bytes)

    def pop(self) -> Any:
        item = super().pop()
        owner, begin = self._pushed.pop(id(item))
        others = [each for each in self.owners[begin:] if each != owner]
        self.delays.setdefault(owner, []).append(len(others))
        self.owners.append(owner)
        return item


async def test_chats_of_owners_take_turns(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that one tenant's slow chats delay its own turn, and that only its own chats are refused."""
    queues: list[RecordedQueue] = []

    def record(max_bytes: int) -> RecordedQueue:
        queues.append(RecordedQueue(max_bytes))
        return queues[-1]

    monkeypatch.setattr(worker_pool, "MAX_WAITING", 20)
    monkeypatch.setattr(worker_pool, "FairQueue", record)
    slow = "{% for i in range(300) %}{% for j in range(300) %}{% endfor %}{% endfor %}"
    renderer = make(f"{{% if messages|length > 1 %}}{slow}{{% endif %}}x")

    async def ask(owner: str, num_messages: int) -> str:
        try:
            return await renderer.render(Chat(HELLO * num_messages), owner)
        except OverloadedError:
            return "refused"

    await ask("one", 1)
    many = [asyncio.create_task(ask("many", 2)) for _ in range(30)]
    await asyncio.sleep(0)
    gone = asyncio.create_task(ask("gone", 2))
    await asyncio.sleep(0)
    gone.cancel()
    assert [await ask("few", 1) for _ in range(3)] == ["x"] * 3
    result = Counter(await asyncio.gather(*many))
    assert 10 <= result["refused"] <= 12, "two are rendered while the others wait"
    [queue] = queues
    assert queue.owners.count("many") == 30 - result["refused"]
    assert len(queue.delays["few"]) == 3
    assert max(queue.delays["few"]) <= 1
