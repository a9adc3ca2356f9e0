"""Declares the chats and completions that other APIs' routes serve too."""

from collections.abc import Mapping
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from tgis.router.api.http.call_context import HttpCall
from tgis.router.api.http.errors import ErrorForm


class ChatApi(Protocol):
    """Handlers of the API that defines the bodies with `messages` and `prompt`."""

    errors: ErrorForm
    request_type: type[Any]
    """Type of a chat's body."""
    default_sampling: Mapping[str, float]
    """Values of the sampling fields that a request does not set."""

    async def answer_chat(self, request: Request) -> Response:
        """Answer a chat. Raises HttpError and RouterError."""

    async def answer_completion(self, request: Request) -> Response:
        """Answer a completion. Raises HttpError and RouterError."""

    async def render(self, chat: Any, call: HttpCall) -> str:
        """Return the prompt of `chat`, a value of the request type. Raises HttpError and RouterError."""
