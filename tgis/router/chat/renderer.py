"""Renders chats with the model's template in processes that can be killed."""

from typing import Any, NamedTuple


class Chat(NamedTuple):
    """Chat in the form that templates expect."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    """True if the prompt ends within the last message, which the answer continues."""
    variables: dict[str, Any] | None = None
    """Further variables of the template."""


class ChatRenderer:
    async def render(self, chat: Chat) -> str:
        """Return the prompt of a chat. Raises RequestError, in one line, if it cannot be rendered."""
        raise NotImplementedError

    def close(self) -> None:
        """Stop all workers. Nothing may be rendered afterwards."""
