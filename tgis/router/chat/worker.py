"""Renders chats in a separate process, with one JSON object per request and per answer. Its time, memory and
output are limited, because templates and chats are untrusted. The router treats a killed worker as an
answer."""

import functools
import json
import os
import resource
import signal
from collections.abc import Iterable
from typing import Any

from jinja2 import Template, TemplateSyntaxError, meta
from jinja2.exceptions import SecurityError

from tgis.process.worker import answer_requests
from tgis.router.chat.continuation import Continuation, NoContinuationError
from tgis.router.chat.environment import RefusedChatError, make_environment
from tgis.router.chat.formats.harmony import CHANNEL
from tgis.router.chat.limits import CPU_LIMIT_S, MEMORY_BYTES, OUT_OF_MEMORY
from tgis.router.chat.template_syntax import takes_content_parts

MAX_CAUSE = 300
NICENESS = 10
# Names of the message field with the model's reasoning. Templates use the first or the second.
REASONING = ("reasoning_content", "thinking", "reasoning")

_environment = make_environment()


class RenderError(Exception):
    """Error in a chat or a template. The text is one line that describes it."""


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(NICENESS)
    try:
        answer_requests(_answer_in_time)
    except MemoryError:
        os._exit(OUT_OF_MEMORY)  # the remaining memory may not suffice for an answer


def _answer_in_time(request: bytes) -> bytes:
    # The signal's default action ends the process, even during library code.
    signal.setitimer(signal.ITIMER_PROF, CPU_LIMIT_S)
    answer = json.dumps(_answer(request)).encode()
    signal.setitimer(signal.ITIMER_PROF, 0)
    return answer


def _answer(encoded: bytes) -> dict[str, object]:
    try:
        request = json.loads(encoded)
        return _check(request["check"]) if "check" in request else {"prompt": _render(request)}
    except RefusedChatError as error:
        return {"refusal": shorten(str(error))}
    except (RenderError, NoContinuationError) as error:
        return {"error": str(error)}
    except RecursionError:
        return {"error": "the chat, or what the chat template does with it, is nested too deeply"}


def _check(text: str) -> dict[str, object]:
    try:
        _environment.from_string(text)
        tree = _environment.parse(text)
        names = sorted(meta.find_undeclared_variables(tree))
        return {"takes_content_parts": takes_content_parts(tree), "variables": names}
    except TemplateSyntaxError as error:
        return {"error": shorten(f"{error.message} in line {error.lineno}")}


def _render(request: dict[str, Any]) -> str:
    is_channel = CHANNEL in request["template"]
    messages = [_with_reasoning(message, is_channel) for message in request["messages"]]
    continuation = Continuation() if request["continue_final_message"] else None
    if continuation is not None:
        continuation.mark(messages)
    prompt = _render_template(
        _compile(request["template"]), request["variables"] | {"messages": messages}, request["max_bytes"]
    )
    return prompt if continuation is None else continuation.cut(prompt)


@functools.lru_cache(maxsize=2)  # the default template and the template for tools
def _compile(text: str) -> Template:
    return _environment.from_string(text)


def _with_reasoning(message: dict[str, Any], is_channel: bool) -> dict[str, Any]:
    """Return the message without null fields, and with its reasoning under both names that templates use.
    With messages in channels, templates refuse `thinking` beside content and calls."""
    present = {name: value for name, value in message.items() if value is not None}
    texts = [present[name] for name in REASONING if name in present]
    if not texts:
        return present
    is_refused = is_channel and present.get("content") and present.get("tool_calls")
    thinking = {} if is_refused else {"thinking": texts[0]}
    return thinking | present | {"reasoning_content": texts[0]}


def _render_template(template: Template, variables: dict[str, Any], max_bytes: int) -> str:
    try:
        return _join(template.root_render_func(template.new_context(variables)), max_bytes)
    except (RefusedChatError, RenderError, RecursionError, MemoryError):
        raise
    except SecurityError as error:
        raise RenderError(f"the chat template does what its sandbox forbids{_place(error)}") from error
    except Exception as error:  # a template can raise any error, whose text may quote the chat
        raise RenderError(f"the chat template failed with {type(error).__name__}{_place(error)}") from error


def _join(pieces: Iterable[str], max_bytes: int) -> str:
    kept = []
    num_bytes = 0
    for piece in pieces:
        kept.append(piece)
        num_bytes += _num_bytes(piece)
        if num_bytes > max_bytes:
            raise RenderError(f"the chat template makes a prompt of more than {max_bytes} bytes")
    return "".join(kept)


def _num_bytes(text: str) -> int:
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        raise RenderError("the chat has a text that is not valid Unicode") from error


def _place(error: Exception) -> str:
    """Return a text with the template's line, or an empty text."""
    line = None
    traceback = error.__traceback__
    while traceback is not None:
        template = traceback.tb_frame.f_globals.get("__jinja_template__")
        if template is not None:
            line = template.get_corresponding_lineno(traceback.tb_lineno)
        traceback = traceback.tb_next
    return "" if line is None else f" in line {line}"


def shorten(text: str) -> str:
    line = " ".join("".join(char if char.isprintable() else " " for char in text[: 2 * MAX_CAUSE]).split())
    return line if len(line) <= MAX_CAUSE else line[: MAX_CAUSE - 1] + "…"


if __name__ == "__main__":
    main()
