"""The playground in headless Chromium, with a launched service and a small random model."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from integration_tests.clients.expectations import Served
from integration_tests.clients.served import launch_served
from integration_tests.playground.browser import Playground, open_chromium, open_playground
from tests.support import npm_packages

pytestmark = pytest.mark.browser

STEP_S = 0.01  # so that a response is visible before it is complete
VARIABLES = "Variables of the chat template, as a JSON object"
MARKDOWN = "Show answers as Markdown"
HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script>"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    flags = ["--playground", "--failpoints", f"router.before_step=sleep:{STEP_S}"]
    with launch_served(tmp_path_factory.mktemp("served"), *flags) as (served, _):
        yield served


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with open_chromium() as browser:
        yield browser


@pytest.fixture
def page(served: Served, browser: Any) -> Iterator[Playground]:
    with open_playground(browser, served.base_url.removesuffix("/v1")) as page:
        page.page.get_by_text("The service needs a bearer token.").wait_for()
        page.fill("Bearer token", served.api_key)
        page.press("Reload models")
        page.page.get_by_text("Ready.").wait_for()
        page.fill(VARIABLES, '{"enable_thinking": false}')
        yield page
        page.check()


def test_models_are_those_that_are_served(page: Playground, served: Served) -> None:
    names = page.page.get_by_label("Model", exact=True).locator("option").all_inner_texts()
    assert names[0] == served.model
    assert len(names) == 3  # another name, and an adapter


def test_chat_is_streamed_and_goes_on(page: Playground, served: Served) -> None:
    page.page.get_by_label(MARKDOWN).uncheck()
    page.fill("Temperature", "0")
    page.fill("Most tokens", "40")
    bodies: list[dict[str, Any]] = []
    page.page.on("request", lambda request: bodies.append(request.post_data_json or {}))
    page.fill("System message", "Be brief.")
    answer = page.ask("once upon a time")
    answer.locator(".content .text").wait_for()
    seen_early = answer.locator(".content .text").inner_text()
    page.wait_for_end()
    text = answer.locator(".content .text").text_content()
    assert text.startswith(seen_early)
    assert len(text) > len(seen_early)
    page.ask_whole("little girl")
    assert bodies[-1]["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "once upon a time"},
        {"role": "assistant", "content": text},
        {"role": "user", "content": "little girl"},
    ]


def test_answers_are_those_of_the_service(page: Playground, served: Served) -> None:
    chat = next(chat for chat in served.chats if len(chat.messages) == 1)
    page.page.get_by_label(MARKDOWN).uncheck()
    page.fill("Temperature", "0")
    page.fill(VARIABLES, "")
    page.fill("Most tokens", str(chat.answer.max_tokens))
    answer = page.ask_whole(chat.messages[0]["content"])
    expected = chat.answer
    assert answer.locator(".content .text").text_content() == expected.text.removesuffix("</s>")
    stats = answer.locator(".stats").inner_text()
    assert f"prompt: {len(expected.ids)} tokens" in stats
    assert f"answer: {len(expected.output_ids)} tokens" in stats
    assert f"end: {expected.finish_reason}" in stats
    assert re.search(r"first token: \d+\.\d\d s · [\d.]+ tokens/s", stats)


def test_sampling_is_the_models_own(page: Playground) -> None:
    values = {
        label: page.page.get_by_label(label).input_value() for label in ("Temperature", "Top p", "Top k")
    }
    assert values == {"Temperature": "0.6", "Top p": "0.95", "Top k": "20"}
    page.fill("Temperature", "")
    page.press("Reload models")
    page.page.get_by_text("Ready.").wait_for()
    page.fill("Most tokens", "2")
    with page.page.expect_request("**/v1/chat/completions") as sent:
        page.ask_whole("hello")
    body = sent.value.post_data_json
    assert (body.get("temperature"), body["top_p"], body["top_k"]) == (None, 0.95, 20)


def test_messages_wait_for_the_running_answer(page: Playground) -> None:
    bodies: list[dict[str, Any]] = []
    page.page.on("request", lambda request: bodies.append(request.post_data_json or {}))
    page.fill("Most tokens", "40")
    page.ask("first").locator(".content .text").wait_for()
    page.page.get_by_label("Message", exact=True).press_sequentially("second")
    page.page.keyboard.press("Enter")
    page.fill("Message", "third")
    page.press("Send after this answer")
    page.fill("Message", "a draft")
    assert page.page.locator("article.waiting").count() == 2
    page.page.locator('article.assistant[aria-busy="false"]').nth(2).wait_for()
    assert page.page.locator("article.waiting").count() == 0
    asked = [message["content"] for message in bodies[-1]["messages"] if message["role"] == "user"]
    assert asked == ["first", "second", "third"]
    titles = page.page.locator("article h2").all_inner_texts()
    assert titles == ["You", "Model"] * 3
    assert page.page.get_by_label("Message", exact=True).input_value() == "a draft"


def test_messages_that_wait_come_back_if_the_answer_is_stopped(page: Playground) -> None:
    page.ask("first").locator(".content .text").wait_for()
    for text in ("second", "third"):
        page.fill("Message", text)
        page.page.keyboard.press("Enter")
    page.fill("Message", "a draft")
    page.press("Stop")
    page.page.get_by_text("Stopped.").wait_for()
    assert page.page.locator("article").count() == 2
    assert page.page.get_by_label("Message", exact=True).input_value() == "second\nthird\na draft"


TEXT = """\
# Title

Some *text* with **weight**, `code <b>`, a [page](https://example.org/a?b=1 "t") &amp; more.

1. one
2. two
   - [x] done

> quoted

| a | b |
|---|--:|
| 1 | 2 |

```python
print("<script>")
```

<b onclick="alert(3)">bold</b> <img src=x onerror=alert(1)>

<script>alert(2)</script>

[a](javascript:alert(4)) [b](data:text/html,x) [c](/relative) ![d](https://example.org/d.png)
[late]

[late]: https://example.org/late
"""


def answer_with(page: Playground, text: str, step: int = 7) -> Any:
    """Respond to the next request with this text, in pieces, and return the article of the response."""
    deltas = [{"content": text[at : at + step]} for at in range(0, len(text), step)]
    chunks = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    page.page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(body=body, content_type="text/event-stream"),
        times=1,
    )
    return page.ask_whole(HOSTILE)


def test_answers_are_shown_as_markdown(page: Playground) -> None:
    """Elements are created one by one: no text becomes an element, and no image is loaded."""
    answer = answer_with(page, TEXT)
    shown = answer.locator(".content")
    assert shown.get_by_role("heading", name="Title").count() == 1
    assert (shown.locator("em").inner_text(), shown.locator("strong").inner_text()) == ("text", "weight")
    assert shown.locator("p code").inner_text() == "code <b>"
    assert "& more" in shown.locator("p").first.inner_text()
    assert shown.locator("ol > li").count() == 2
    assert shown.locator("ul > li").inner_text() == "☑ done"
    assert shown.locator("blockquote").inner_text().strip() == "quoted"
    assert shown.locator("td").all_inner_texts() == ["1", "2"]
    assert shown.locator("td").nth(1).evaluate("cell => getComputedStyle(cell).textAlign") == "right"
    assert shown.locator("pre").inner_text().strip() == 'print("<script>")'
    links = shown.locator("a").evaluate_all(
        "links => links.map(link => [link.textContent, link.href, link.rel])"
    )
    assert [link[:2] for link in links] == [
        ["page", "https://example.org/a?b=1"],
        ["image: d", "https://example.org/d.png"],
        ["late", "https://example.org/late"],
    ]
    assert {link[2] for link in links} == {"noopener noreferrer"}
    text = shown.inner_text()
    for source in ('<b onclick="alert(3)">bold</b>', "<script>alert(2)</script>", "[a](javascript:alert(4))"):
        assert source in text
    assert page.page.locator("article img, article script, article b, article [onclick]").count() == 0
    assert page.page.locator("article.user .text").inner_text() == HOSTILE
    page.page.get_by_label(MARKDOWN).uncheck()
    assert shown.locator(".text").text_content() == TEXT
    with page.page.expect_request("**/v1/chat/completions") as sent:
        page.fill("Most tokens", "2")
        page.ask_whole("and now?")
    assert sent.value.post_data_json["messages"][1]["content"] == TEXT


def test_a_text_that_is_nested_too_deeply_is_shown(page: Playground) -> None:
    text = "> " * 30_000 + "x"
    assert answer_with(page, text, 10_000).locator(".content .text").text_content().endswith("x")


def test_stop_ends_the_request(page: Playground, served: Served) -> None:
    answer = page.ask("fox and dog")
    answer.locator(".content .text").wait_for()
    page.press("Stop")
    page.page.get_by_text("Stopped.").wait_for()
    assert "end: stopped" in answer.locator(".stats").inner_text()
    text = answer.inner_text()
    page.fill("Most tokens", "2")
    page.ask_whole("again")
    assert answer.inner_text() == text


def test_probabilities_are_shaded_and_alternatives_shown(page: Playground) -> None:
    page.fill("Temperature", "0")
    page.fill("Most tokens", "6")
    page.fill("Alternatives of each token", "3")
    page.page.get_by_label("Show them").check()
    answer = page.ask_whole("quick brown")
    tokens = answer.locator(".tokens").get_by_role("button")
    assert tokens.count() == 6
    assert {tokens.nth(i).get_attribute("data-likely") for i in range(6)} <= set("01234")
    shown = page.page.get_by_role("tooltip")
    assert not shown.is_visible()
    tokens.nth(2).hover()
    assert shown.get_by_role("row").count() == 3
    hovered = shown.inner_text()
    assert hovered.split("\t")[0] != ""
    page.page.mouse.move(0, 0)
    assert not shown.is_visible()
    tokens.nth(0).focus()
    page.page.keyboard.press("ArrowRight")
    page.page.keyboard.press("ArrowRight")
    assert shown.inner_text() == hovered
    percents = [float(each) for each in re.findall(r"([\d.]+) %", hovered)]
    assert percents == sorted(percents, reverse=True)
    assert shown.locator(".chosen").count() == 1
    page.page.keyboard.press("Escape")
    assert not shown.is_visible()


def test_answer_follows_the_schema(page: Playground) -> None:
    schema = {"type": "object", "properties": {"animal": {"enum": ["fox", "dog"]}}, "required": ["animal"]}
    page.fill("JSON schema", json.dumps(schema | {"additionalProperties": False}))
    answer = page.ask_whole("an animal")
    assert json.loads(answer.locator(".content .text").inner_text())["animal"] in ("fox", "dog")


def test_reasoning_is_folded(page: Playground) -> None:
    page.fill(VARIABLES, '{"enable_thinking": true}')
    page.fill("Most tokens of reasoning", "9")
    page.fill("Most tokens", "40")
    answer = page.ask_whole("a quick fox")
    reasoning = answer.get_by_text("Reasoning", exact=True)
    text = answer.locator(".reasoning .text")
    assert not text.is_visible()
    reasoning.click()
    assert text.is_visible()
    assert text.text_content()
    assert re.search(r"answer: \d+ tokens, (9|10) of reasoning", answer.locator(".stats").inner_text())


def test_calls_that_are_cut_are_not_sent_back(page: Playground) -> None:
    long = {"type": "string", "minLength": 200}
    parameters = {"type": "object", "properties": {"city": long}, "required": ["city"]}
    function = {"name": "weather", "parameters": parameters}
    page.fill("Tools, as a JSON list", json.dumps([{"type": "function", "function": function}]))
    page.page.get_by_label("Calls of tools").select_option("required")
    page.fill("Most tokens", "40")
    answer = page.ask_whole("what is the weather?")
    with pytest.raises(json.JSONDecodeError):
        json.loads(answer.locator(".arguments").text_content())
    assert answer.get_by_label("Result").is_disabled()
    page.page.get_by_label("Calls of tools").select_option("none")
    page.fill("Most tokens", "3")
    page.ask_whole("and now?")
    assert page.error == ""
    assert page.answers.count() == 2


def test_calls_are_shown_and_their_results_sent(page: Playground) -> None:
    parameters = {"type": "object", "properties": {"city": {"const": HOSTILE}}, "required": ["city"]}
    function = {"name": "weather", "parameters": parameters | {"additionalProperties": False}}
    page.fill("Tools, as a JSON list", json.dumps([{"type": "function", "function": function}]))
    page.page.get_by_label("Calls of tools").select_option("required")
    page.fill("Most tokens", "300")
    answer = page.ask_whole("what is the weather?")
    call = answer.locator(".calls details").first
    assert call.get_by_text("Call of weather", exact=True).is_visible()
    arguments = call.locator(".arguments").text_content()
    assert json.loads(arguments) == {"city": HOSTILE}
    hidden = "box => box.scrollHeight - box.scrollTop - box.clientHeight"
    assert page.page.get_by_role("log").evaluate(hidden) < 2  # the end is visible
    num_calls = answer.locator(".calls textarea:enabled").count()  # the last one may be truncated
    call.get_by_label("Result").fill("dry")
    page.page.get_by_label("Calls of tools").select_option("none")
    page.fill("Most tokens", "3")
    with page.page.expect_request("**/v1/chat/completions") as sent:
        page.ask_whole("")
    asked, called, result, *others = sent.value.post_data_json["messages"]
    assert asked == {"role": "user", "content": "what is the weather?"}
    assert called["tool_calls"][0]["function"] == {"name": "weather", "arguments": arguments}
    assert result == {"role": "tool", "tool_call_id": called["tool_calls"][0]["id"], "content": "dry"}
    assert len(others) == num_calls - 1
    assert page.error == ""


def test_hostile_text_is_only_text(page: Playground, served: Served) -> None:
    """The model is forced to write it, with and without probabilities, and the user writes it too."""
    page.fill("JSON schema", json.dumps({"const": HOSTILE}))
    for _ in range(2):
        answer = page.ask_whole(HOSTILE)
        assert json.loads(answer.locator(".content .text").inner_text()) == HOSTILE
        page.page.get_by_label("Show them").check()
    spelled = answer.locator(".tokens").inner_text()
    assert "onerror=alert(1)" in spelled
    answer.locator(".tokens").get_by_role("button").first.hover()
    assert page.page.locator("article img, article script, #alternatives img").count() == 0


def test_errors_are_shown_as_text(page: Playground, served: Served) -> None:
    page.fill("JSON schema", '{"type": ')
    page.fill("Message", "hello")
    page.press("Send")
    assert page.error.startswith("JSON schema: ")
    page.fill("JSON schema", json.dumps({"type": HOSTILE}))
    page.press("Send")
    page.page.get_by_role("alert").get_by_text("400: ").wait_for()
    assert page.page.get_by_label("Message", exact=True).input_value() == "hello"  # it can be sent again
    page.fill("JSON schema", "")
    page.fill("Temperature", "7")
    page.press("Send")
    assert page.error.startswith("Temperature: ")
    assert page.page.get_by_label("Temperature").get_attribute("aria-invalid") == "true"
    assert page.page.locator("article").count() == 0
    page.fill("Temperature", "")
    page.fill("Most tokens", "2")
    page.press("Send")
    page.page.get_by_text("The answer is complete.").wait_for()
    assert page.error == ""


def test_a_wrong_token_is_reported(page: Playground, served: Served) -> None:
    page.fill("Bearer token", "wrong")
    page.press("Reload models")
    page.page.get_by_role("alert").get_by_text("401: a valid bearer token is required").wait_for()
    token = page.page.get_by_label("Bearer token")
    assert token.get_attribute("aria-invalid") == "true"
    token.fill(served.api_key)
    page.fill("Most tokens", "2")
    page.ask_whole("hello")


def test_token_is_kept_in_memory_only(page: Playground, served: Served) -> None:
    stored = page.page.evaluate("[document.cookie, localStorage.length, sessionStorage.length]")
    assert stored == ["", 0, 0]
    assert served.api_key not in page.page.url
    page.page.reload()
    page.page.get_by_text("The service needs a bearer token.").wait_for()
    assert page.page.get_by_label("Bearer token").input_value() == ""


def test_the_policy_blocks_forbidden_actions(served: Served, browser: Any) -> None:
    """Otherwise the other tests would not notice a violation either."""
    tries = {
        "require-trusted-types-for": "document.body.innerHTML = '<b>text</b>'",
        "img-src": "document.body.append(Object.assign(new Image(), { src: 'http://127.0.0.1:9/' }))",
        "connect-src": "fetch('http://127.0.0.1:9/').catch(() => null)",
        "style-src-attr": "document.body.setAttribute('style', 'color: red')",
    }
    for directive, script in tries.items():
        with open_playground(browser, served.base_url.removesuffix("/v1")) as page:
            page.page.get_by_text("The service needs a bearer token.").wait_for()
            page.page.evaluate(f"() => {{ try {{ {script} }} catch {{ }} }}")
            page.page.wait_for_timeout(100)
            assert any(directive in complaint for complaint in page.complaints), directive


WINDOWS = {
    "wide": {"viewport": {"width": 1200, "height": 800}},
    "wide, dark": {"viewport": {"width": 1200, "height": 800}, "color_scheme": "dark"},
    "narrow": {"viewport": {"width": 360, "height": 740}},
    "narrow, dark": {"viewport": {"width": 360, "height": 740}, "color_scheme": "dark"},
}


@pytest.mark.parametrize("window", WINDOWS)
def test_nothing_hinders_readers(window: str, served: Served, browser: Any, axe: str) -> None:
    """Long words do not widen a narrow page, and axe-core, which checks contrast, names and roles, reports
    nothing, before and after a response."""
    with open_playground(browser, served.base_url.removesuffix("/v1"), **WINDOWS[window]) as page:
        is_narrow = "narrow" in window
        assert page.page.get_by_label("Bearer token").is_visible() != is_narrow  # there, they are collapsed
        if is_narrow:
            page.page.get_by_text("Settings", exact=True).click()
        page.fill("Bearer token", "wrong")
        page.press("Reload models")
        page.page.get_by_role("alert").get_by_text("401").wait_for()
        assert find_hindrances(page, axe) == []
        page.fill("Bearer token", served.api_key)
        page.press("Reload models")
        page.page.get_by_text("Ready.").wait_for()
        page.fill(VARIABLES, '{"enable_thinking": true}')
        page.fill("Most tokens of reasoning", "5")
        page.fill("Most tokens", "30")
        page.page.get_by_label("Show them").check()
        answer = page.ask_whole("brown " * 20 + "x" * 300)
        answer.get_by_text("Reasoning", exact=True).click()
        answer.locator(".tokens .token").nth(2).focus()
        assert page.page.get_by_role("tooltip").is_visible()
        assert find_hindrances(page, axe) == []
        answer_with(page, f"{TEXT}\n```\n{'wide ' * 60}\n```\n| {'wide | ' * 40}\n{'|-' * 40}|\n")
        page.fill(VARIABLES, "")
        page.fill("Most tokens", "200")
        page.ask("again")
        page.fill("Message", "waits")
        page.page.keyboard.press("Enter")
        assert find_hindrances(page, axe) == []
        page.page.locator("article.waiting").wait_for(state="detached")
        assert page.page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        page.check()


@pytest.fixture(scope="module")
def axe() -> str:
    packages = npm_packages.install(Path(__file__).parent, "playground")
    return (packages / "node_modules" / "axe-core" / "axe.min.js").read_text()


def find_hindrances(page: Playground, axe: str) -> list[str]:
    # Its usual method needs a new document; the driver may run scripts despite the policy.
    page.page.evaluate(axe)
    results = page.page.evaluate("axe.run(document, { resultTypes: ['violations'] })")
    return [
        f"{each['id']}: {node['html'][:200]} {node['failureSummary']}"
        for each in results["violations"]
        for node in each["nodes"]
    ]
