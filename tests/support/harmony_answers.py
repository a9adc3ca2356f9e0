"""Random answers in messages, and a reader of whole answers that follows the published format with regular
expressions."""

import random
import re

from tests.support.answers import CallText

NAMES = frozenset(("f", "get.it"))
OPENED = "<|start|>assistant"
_MARK = r"<\|(?:start|channel|constrain|message|end|call|return)\|>"
_MESSAGE = re.compile(rf"(.*?)<\|message\|>(.*?)(?={_MARK}|\Z)", re.DOTALL)
_BEGIN = re.compile(r"<\|(?:start|end|call|return)\|>")
_RECIPIENT = re.compile(r"\bto=functions\.([\w.-]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_WORDS = [
    "Yes.",
    " ",
    "\n",
    "é🙂",
    "<",
    "<|",
    "<|x|>",
    "|>",
    "analysis",
    "final",
    "to=",
    "to=functions.f",
    '{"x": 1}',
    "{}",
]
_MARKS = ["<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"]


def read_messages(text: str) -> tuple[str, str, list[CallText]]:
    """Return the reasoning, the content and the calls of an answer after `OPENED`."""
    begins_message = re.match(rf"[ \t\r\n]*(?:{_MARK}|to=)", text)
    reasoning, content, calls = "", "", list[CallText]()
    for header, body in _MESSAGE.findall(OPENED + ("" if begins_message else "<|message|>") + text):
        header = _BEGIN.split(header)[-1]
        recipient, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
        if recipient and recipient[1] in NAMES:
            calls.append(CallText(recipient[1], body or "{}"))
        elif channel and channel[1] == "analysis":
            reasoning += body
        else:
            content += body
    return reasoning, content, calls


def random_answer(r: random.Random) -> str:
    """Return an answer of messages, often with an error."""
    text = "<|end|><|start|>assistant".join(_message(r) for _ in range(r.randrange(1, 4)))
    text += r.choice(["", "<|return|>", "<|call|>", "<|end|>"])
    for _ in range(r.choice([0, 0, 1, 4])):
        at = r.randrange(len(text) + 1)
        text = text[:at] + r.choice(_WORDS + _MARKS) + text[at + r.choice([0, 0, 1, 6]) :]
    return text


def _message(r: random.Random) -> str:
    body = "".join(r.choices(_WORDS, k=r.randrange(4)))
    name = r.choice([*sorted(NAMES), "nope"])
    headers = [
        "<|channel|>analysis",
        "<|channel|>final",
        "<|channel|>commentary",
        f"<|channel|>commentary to=functions.{name} <|constrain|>json",
        f" to=functions.{name}<|channel|>commentary json",
    ]
    return f"{r.choice(headers)}<|message|>{body}"
