"""Cuts a prompt after the text of the last message, so that the answer continues that text."""

import secrets
from typing import Any


class NoContinuationError(Exception):
    """Error when a prompt cannot end within the last message. The text is one line."""


class Continuation:
    """Random mark at the end of the last message's text, which no message can contain."""

    def __init__(self) -> None:
        self._word = f"END{secrets.token_hex(16)}"
        self._text = ""

    def mark(self, messages: list[dict[str, Any]]) -> None:
        """Append the mark to the last text of the last message. Raises NoContinuationError."""
        content = messages[-1].get("content") if messages else None
        if isinstance(content, str):
            self._text = content
            messages[-1]["content"] = content + self._mark
            return
        texts = [part for part in content or () if isinstance(part, dict) and "text" in part]
        if not texts:
            raise NoContinuationError("the last message has no text to continue")
        self._text = texts[-1]["text"]
        texts[-1]["text"] += self._mark

    def cut(self, prompt: str) -> str:
        """Return the prompt up to the mark. Raises NoContinuationError."""
        at = prompt.rfind(self._word)
        if at < 0 or self._text.strip() not in prompt:
            raise NoContinuationError("the chat template omits or changes the text to continue")
        is_trimmed = not prompt.startswith(self._mark, at)
        return prompt[:at].rstrip() if is_trimmed else prompt[:at]

    @property
    def _mark(self) -> str:
        """Random word and a space. The space is lost if the template trims texts."""
        return self._word + " "
