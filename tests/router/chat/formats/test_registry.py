"""Check that formats are detected by the template, and that its own calls and reasoning are parsed."""

import itertools
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from tests.support.answers import Answer, parse, to_answer
from tests.support.chats import FAMILIES, SPECIAL_TOKENS, template_text
from tgis.config.serving import ServingOptions
from tgis.router.chat.answers.messages import MessageParser
from tgis.router.chat.answers.parser import AnswerParser
from tgis.router.chat.environment import make_environment
from tgis.router.chat.formats.harmony import find_open_message
from tgis.router.chat.formats.registry import REASONING_FORMATS, TOOL_FORMATS, ChatFormats, choose_formats
from tgis.router.chat.formats.types import ReasoningFormat, ToolFormat
from tgis.router.errors import StartupError

ROOT = Path(__file__).resolve().parents[4]
# Names of the call and reasoning formats, by template.
EXPECTED = {
    "chatml_tools": ("hermes", "think"),
    "deepseek_hybrid": ("deepseek_v31", "think"),
    "deepseek_reasoning": (None, "think"),
    "deepseek_tools": ("deepseek_v3", None),
    "deepseek_v32": ("deepseek_v32", "think"),
    "gemma4": ("gemma4", "gemma4"),
    "glm45": ("glm45", "think"),
    "gpt_oss": ("harmony", "harmony"),
    "granite_tools": ("granite", "granite"),
    "llama3_tools": ("llama3", None),
    "llama_pythonic": ("pythonic", None),
    "mistral_reasoning": ("mistral_v11", "mistral"),
    "mistral_tools": ("mistral", None),
    "olmo3": ("olmo3", None),
    "phi_functools": ("phi4_functools", None),
    "phi_tools": ("phi4", None),
    "qwen3": ("hermes", "think"),
    "qwen3_coder": ("qwen3_coder", "think"),
    "smollm3": ("hermes", "think"),
}
# Instructions for function calls in published templates.
PUBLISHED = {
    "hermes": """{{- '<tool_call>\\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}""",
    "llama3": """"Environment: ipython\\n" {{- '{"name": "' + name + '", ' }}{{- '"parameters": ' }}""",
    "qwen3_coder": "'<tool_call>\\n<function=example_function_name>\\n<parameter=example_parameter_1>'",
}
ONE_CALL = {"gpt_oss", "llama3_tools"}
NO_CONTENT = {"llama3_tools", "llama_pythonic", "mistral_tools"}
ENDS = (
    "</s>",
    "<|end|>\n",
    "<|end|>",
    "<|call|>",
    "<|return|>",
    "<|im_end|>\n",
    "<turn|>\n",
    "<|end_of_text|>\n",
    "<|eot|>",
    "<｜end▁of▁sentence｜>",
    "",
)
USER = {"role": "user", "content": "Hello"}
ARGUMENTS = [{}, {"q": 'a}"]</tool_call>é\n', "n": [1, {"x": None}]}]
NAMES = ("look_up", "add")
REASONING = [
    "gemma4",
    "glm45",
    "qwen3",
    "qwen3_coder",
    "smollm3",
    "granite_tools",
    "mistral_reasoning",
    "deepseek_hybrid",
    "deepseek_v32",
    "gpt_oss",
]
CHECKED = [family for family in EXPECTED if EXPECTED[family][0]]


def names_of(formats: ChatFormats) -> tuple[str | None, str | None]:
    tools, reasoning = formats
    return tools.name if tools else None, reasoning.name if reasoning else None


def find(text: str | None) -> ChatFormats:
    return choose_formats(text, "auto", "auto")


def render(family: str, messages: list[dict[str, Any]], is_prompt: bool, thinks: bool) -> str:
    tools = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in NAMES]
    template = make_environment().from_string(template_text(family))
    variables = SPECIAL_TOKENS | {"thinking": thinks, "tools": tools, "date": "1 May 2030"}
    return template.render(messages=messages, add_generation_prompt=is_prompt, **variables)


def write(family: str, message: dict[str, Any], thinks: bool) -> tuple[str, str]:
    """Return the prompt, and the answer as the template writes it into a history."""
    prompt = render(family, [USER], is_prompt=True, thinks=thinks)
    history = render(family, [USER, message], is_prompt=False, thinks=thinks)
    assert history.startswith(prompt)
    answer = history[len(prompt) :]
    return prompt, next(answer.removesuffix(end) for end in ENDS if answer.endswith(end))


def message_of(content: str | None, calls: list[tuple[str, Any]], reasoning: str | None) -> dict[str, Any]:
    functions = [{"name": name, "arguments": arguments} for name, arguments in calls]
    tool_calls = [{"id": "abcdefgh1", "type": "function", "function": function} for function in functions]
    message = {"role": "assistant", "content": content, "tool_calls": tool_calls}
    return message | ({} if reasoning is None else {"reasoning_content": reasoning})


def read(formats: ChatFormats, prompt: str, text: str) -> Answer:
    tools, reasoning = formats
    if tools is not None and tools.is_channel:
        opened = find_open_message(prompt)
        return to_answer(parse(MessageParser(opened, reasoning is not None, set(NAMES)), text))
    if reasoning is not None and prompt.rstrip().endswith(reasoning.end):
        reasoning = None
    has_begun = reasoning is not None and prompt.rstrip().endswith(reasoning.begin)
    pieces = parse(AnswerParser(reasoning, has_begun, tools, set(NAMES)), text)
    return to_answer(pieces)


@pytest.mark.parametrize("family", FAMILIES)
def test_templates_show_their_formats(family: str) -> None:
    assert names_of(find(template_text(family))) == EXPECTED.get(family, (None, None))


def test_published_texts_show_their_formats() -> None:
    assert {name: names_of(find(text))[0] for name, text in PUBLISHED.items()} == {n: n for n in PUBLISHED}
    assert find(None) == (None, None)


def test_every_format_has_a_template() -> None:
    tools, reasoning = zip(*EXPECTED.values(), strict=True)
    assert {one.name for one in TOOL_FORMATS} == {*tools} - {None}
    assert {one.name for one in REASONING_FORMATS} == {*reasoning} - {None}


@pytest.mark.parametrize("family", CHECKED)
def test_calls_of_a_history_are_read_back(family: str) -> None:
    formats = find(template_text(family))
    for num_calls, content in itertools.product((1,) if family in ONE_CALL else (1, 2, 3), ("", "I look.")):
        if content and family in NO_CONTENT:
            continue
        calls = [(NAMES[i % 2], ARGUMENTS[(i + num_calls) % 2]) for i in range(num_calls)]
        prompt, answer = write(family, message_of(content, calls, None), thinks=False)
        assert read(formats, prompt, answer) == (content, calls, "")


@pytest.mark.parametrize("family", REASONING)
@pytest.mark.parametrize("calls", [[], [("add", {})]])
def test_reasoning_of_a_history_is_read_back(family: str, calls: list[tuple[str, Any]]) -> None:
    formats = find(template_text(family))
    message = message_of("Yes.", calls, "Hm,\n\nso.")
    prompt, answer = write(family, message, thinks=True)
    content, result, reasoning = read(formats, prompt, answer)
    assert (content, result, reasoning.strip("\n")) == ("Yes.", calls, "Hm,\n\nso.")


def test_options_name_formats() -> None:
    text = template_text("qwen3")
    named = {
        ("none", "none"): (None, None),
        ("llama3", "mistral"): ("llama3", "mistral"),
        ("llama3_json", "deepseek_r1"): ("llama3", "think"),
        ("qwen3_xml", "none"): ("qwen3_coder", None),
        ("phi4_mini_json", "qwen3"): ("phi4_functools", "think"),
        ("auto", "granite"): ("hermes", "granite"),
    }
    for (tools, reasoning), expected in named.items():
        assert names_of(choose_formats(text, tools, reasoning)) == expected
    with pytest.raises(StartupError, match=r"^--tool-call-parser xml is not known; .* auto, none, deep"):
        choose_formats(None, "xml", "auto")
    with pytest.raises(StartupError, match=r"^--reasoning-parser hermes is not known; .* auto, none, m"):
        choose_formats(None, "auto", "hermes")


@pytest.mark.parametrize("formats", [TOOL_FORMATS, REASONING_FORMATS])
def test_names_are_one_format_each(formats: tuple[ToolFormat | ReasoningFormat, ...]) -> None:
    names = [name for one in formats for name in (one.name, *one.other_names)]
    assert len({*names, "auto", "none"}) == len(names) + 2


def test_the_page_lists_all_names() -> None:
    page = (ROOT / "docs" / "openai.md").read_text()
    for one in (*TOOL_FORMATS, *REASONING_FORMATS):
        for name in (one.name, *one.other_names):
            assert f"`{name}`" in page, name
    defaults = {f.name: f.default for f in fields(ServingOptions)}
    assert defaults["tool_call_parser"] == defaults["reasoning_parser"] == "auto"
