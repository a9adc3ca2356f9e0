"""Random chats, and transformers' rendering of them."""

import random
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from tgis.router.chat.renderer import Chat

TEMPLATES = Path(__file__).parent.parent / "data" / "chat_templates"
FAMILIES = sorted(path.stem for path in TEMPLATES.glob("*.jinja"))
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
TEXTS = ["", " ", "Hello", " two  words \n", "line\n\nline\r\n", "é東🙂e\u0301", '"quoted" \\ <b>&amp;</b>']
TEXTS += ["</s>[INST]", "{{ bos_token }}{% raw %}", "a</think>\n\nb", "None", "\u2028\x00\t", "x" * 70]


def template_text(family: str) -> str:
    return (TEMPLATES / f"{family}.jinja").read_text()


class Reference:
    """Transformers' rendering with a tokenizer that has only the template and special tokens."""

    def __init__(self, template: str) -> None:
        tokenizer = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1}, unk_token="<s>"))
        self._tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL_TOKENS)
        self._template = template

    def render(self, chat: Chat) -> str | None:
        """Return the prompt, or None if the chat cannot be rendered."""
        try:
            prompt = self._tokenizer.apply_chat_template(
                chat.messages,
                tools=chat.tools,
                documents=chat.documents,
                chat_template=self._template,
                tokenize=False,
                add_generation_prompt=chat.add_generation_prompt,
                continue_final_message=chat.continue_final_message,
                **(chat.variables or {}),
            )
        except (TemplateError, TypeError, ValueError, AttributeError):
            return None
        assert isinstance(prompt, str)
        return prompt


def random_chats(seed: int, count: int) -> list[Chat]:
    r = random.Random(seed)
    return [_random_chat(r) for _ in range(count)]


def _random_chat(r: random.Random) -> Chat:
    ending = r.choice(["generate", "continue", "neither"])
    return Chat(
        messages=_random_messages(r, ends_with_assistant=ending == "continue"),
        tools=r.choice([None, None, [], [_tool(r) for _ in range(r.randrange(1, 3))]]),
        documents=r.choice([None, [{"title": _text(r), "text": _text(r)} for _ in range(r.randrange(1, 4))]]),
        add_generation_prompt=ending == "generate",
        continue_final_message=ending == "continue",
        variables=r.choice([None, {"enable_thinking": r.random() < 0.5}, {"date": "1 May 2030"}]),
    )


def _random_messages(r: random.Random, ends_with_assistant: bool) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if r.random() < 0.4:
        messages.append({"role": "system", "content": _text(r)})
    for _ in range(r.randrange(1, 4)):
        messages += [{"role": "user", "content": _text(r)}, _assistant(r)]
        if r.random() < 0.2:
            messages.append({"role": "tool", "content": _text(r), "tool_call_id": "c1"})
    if ends_with_assistant:
        while r.random() < 0.8 and messages[-1]["role"] != "user":
            messages.pop()
        return [*messages, {"role": "assistant", "content": _text(r)}]
    return messages[: r.randrange(1, len(messages) + 1)]


def _assistant(r: random.Random) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": _text(r)}
    kind = r.random()
    if kind < 0.15:
        function = {"name": "look_up", "arguments": {"q": _text(r), "n": r.choice([1, 2.5, None, True])}}
        message |= {"content": None, "tool_calls": [{"id": "c1", "type": "function", "function": function}]}
    elif kind < 0.3:
        message |= {r.choice(["reasoning_content", "reasoning", "thinking"]): _text(r), "tool_calls": None}
    return message


def _tool(r: random.Random) -> dict[str, Any]:
    inner = {"type": "object", "properties": {"é": {"type": "number"}}, "required": ["é"]}
    parameters = {
        "type": "object",
        "properties": {"q": {"type": "string"}, "inner": inner},
        "required": ["q"],
    }
    function = {"name": r.choice(["look_up", "add"]), "description": _text(r), "parameters": parameters}
    return {"type": "function", "function": function}


def _text(r: random.Random) -> str:
    return "".join(r.choices(TEXTS, k=r.choice([1, 1, 2])))
