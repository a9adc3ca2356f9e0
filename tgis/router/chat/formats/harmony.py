"""Harmony, the format of gpt-oss: an answer consists of messages. A message is a header, which names the
channel and the function that is called, if any, and a body:

    <|start|>assistant<|channel|>analysis<|message|>reasoning<|end|>
    <|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"x": 1}<|call|>
    <|start|>assistant<|channel|>final<|message|>content<|return|>

The prompt ends with `<|start|>assistant`. The function may also precede the channel. `<|call|>` and
`<|return|>` end the answer."""

import re

from tgis.router.chat.formats.types import ChannelCall, ReasoningFormat, ToolFormat

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
MARKS = (START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN)
ROLE, REASONING, CALLS, CONTENT = "assistant", "analysis", "commentary", "final"
RECIPIENT, FUNCTIONS = "to=", "functions."

HARMONY = ToolFormat(
    "harmony",
    ChannelCall(),
    in_template=(CHANNEL, MESSAGE, FUNCTIONS),
    other_names=("openai",),
)

HARMONY_REASONING = ReasoningFormat(
    "harmony",
    f"{CHANNEL}{REASONING}{MESSAGE}",
    END,
    in_template=(f"{CHANNEL}{REASONING}{MESSAGE}",),
    other_names=("openai_gptoss",),
    is_channel=True,
)

_CHANNEL_NAME = re.compile(rf"{re.escape(CHANNEL)}\s*(\w+)")
_FUNCTION = re.compile(rf"\b{RECIPIENT}{re.escape(FUNCTIONS)}([\w.-]+)")


def find_channel(header: str) -> str:
    """Return the name of a header's channel, or an empty string."""
    match = _CHANNEL_NAME.search(header)
    return match[1] if match else ""


def find_function(header: str) -> str:
    """Return the name of the function that a header calls, or an empty string."""
    match = _FUNCTION.search(header)
    return match[1] if match else ""


def find_open_message(prompt: str) -> str:
    """Return the part of the prompt that belongs to the message that it has begun."""
    begin = prompt.rfind(START)
    text = prompt[begin:] if begin >= 0 else ""
    return "" if any(mark in text for mark in (END, CALL, RETURN)) else text
