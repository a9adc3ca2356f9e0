"""Renders chats with the model's template in processes that can be killed."""

import time
from collections.abc import Hashable
from typing import Any, NamedTuple

from tgis.process.worker_pool import PoolBusyError, Reply, WorkerPool
from tgis.router.chat.limits import MAX_PROMPT_BYTES, NUM_WORKERS, OUT_OF_MEMORY, TIMEOUT_S
from tgis.router.chat.template import WORKER, ChatTemplate
from tgis.router.errors import (
    OVERLOADED,
    OverloadedError,
    RequestError,
    RouterError,
    UnavailableError,
)
from tgis.router.metrics.metrics import Metrics

NO_TEMPLATE = (
    "the model has no chat template: send a prompt to /v1/completions, or start the service with "
    "--chat-template FILE"
)
FIXED_VARIABLES = frozenset(("messages", "tools", "documents", "add_generation_prompt"))


class Chat(NamedTuple):
    """Chat in the form that templates expect."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    """True if the prompt ends with the text of the last message, which the answer continues."""
    variables: dict[str, Any] | None = None
    """Further variables of the template."""


class ChatRenderer:
    """Renderer of chats in separate processes, which start on first use."""

    def __init__(
        self,
        template: ChatTemplate | None,
        max_prompt_bytes: int = MAX_PROMPT_BYTES,
        metrics: Metrics | None = None,
    ) -> None:
        self._template = template
        self._max_prompt_bytes = max_prompt_bytes
        self._metrics = metrics
        self._pool = WorkerPool(WORKER, NUM_WORKERS, TIMEOUT_S)

    @property
    def takes_content_parts(self) -> bool:
        """True if the template expects a message's content as a list of parts."""
        return self._template is not None and self._template.takes_content_parts

    @property
    def takes_developer_role(self) -> bool:
        """True if the template supports developer messages; otherwise they become system messages."""
        return self._template is not None and "developer" in self._template.text_for(has_tools=False)

    def reads(self, variable: str) -> bool:
        """Return True if the template has a variable of this name."""
        return self._template is not None and variable in self._template.variables

    async def render(self, chat: Chat, owner: Hashable = "") -> str:
        """Return the prompt of a chat. Owners are served in turn. Raises OverloadedError, UnavailableError if
        the machine is too busy, and RequestError with a one-line text if the chat cannot be rendered."""
        if self._template is None:
            raise RequestError(NO_TEMPLATE)
        _require_renderable(chat)
        started_at = time.monotonic()
        try:
            reply = await self._pool.ask(self._request(self._template, chat), owner)
        except UnicodeEncodeError as error:
            raise RequestError("the chat has a text that is not valid Unicode") from error
        except (ValueError, OverflowError, RecursionError) as error:
            raise RequestError("the chat is nested too deeply, or has a number out of range") from error
        except PoolBusyError:
            raise OverloadedError(OVERLOADED) from None
        try:
            return _read_prompt(reply)
        except RouterError:
            if self._metrics is not None:
                self._metrics.chat_template_failure.add("killed" if reply.is_dead else "template")
            raise
        finally:
            if self._metrics is not None:
                self._metrics.chat_template_duration.observe(time.monotonic() - started_at)

    def close(self) -> None:
        """Stop all workers. `render` must not be called afterwards."""
        self._pool.close()

    def _request(self, template: ChatTemplate, chat: Chat) -> dict[str, object]:
        fixed = {name: getattr(chat, name) for name in FIXED_VARIABLES}
        return {
            "template": template.text_for(has_tools=chat.tools is not None),
            "messages": fixed.pop("messages"),
            "variables": template.special_tokens | (chat.variables or {}) | fixed,
            "continue_final_message": chat.continue_final_message,
            "max_bytes": self._max_prompt_bytes,
        }


def _require_renderable(chat: Chat) -> None:
    if not chat.messages:
        raise RequestError("messages must not be empty")
    if chat.add_generation_prompt and chat.continue_final_message:
        raise RequestError(
            "add_generation_prompt and continue_final_message must not both be true", "continue_final_message"
        )
    if taken := sorted(FIXED_VARIABLES & (chat.variables or {}).keys()):
        raise RequestError(f"chat_template_kwargs must not have {taken[0]}", "chat_template_kwargs")


def _read_prompt(reply: Reply) -> str:
    if reply.is_late:
        raise UnavailableError("the chat was not rendered in time, because the service's machine is busy")
    if reply.is_dead:
        cause = "needs too much memory" if reply.status == OUT_OF_MEMORY else "takes too long"
        raise RequestError(f"the chat template {cause}")
    match reply.value:
        case {"prompt": str(prompt)}:
            return prompt
        case {"refusal": text}:
            # Templates quote messages.
            shown = "the chat template refuses the chat"
            raise RequestError(f"the chat template refuses the chat: {text}", log_text=shown)
        case other:
            raise RequestError(other["error"])
