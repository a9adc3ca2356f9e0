"""Describes OpenAI's API."""

from functools import partial
from typing import TYPE_CHECKING

from tgis.router.api.interface import Interface
from tgis.router.api.openai.rules import OPENAI
from tgis.router.api.vllm.options.names import OPTIONS

if TYPE_CHECKING:
    from tgis.router.api.http.chat_api import ChatApi
    from tgis.router.api.http.http_api import HttpApi
    from tgis.router.api.http.service_parts import ServiceParts
    from tgis.router.metrics.aliased_series import MakeAliases


def _build_chat_api(parts: "ServiceParts") -> "ChatApi":
    from tgis.router.api.openai.chat_api import OpenAiChatApi

    return OpenAiChatApi(parts)


def _build_http_api(parts: "ServiceParts", chats: "ChatApi") -> "HttpApi":
    from tgis.router.api.openai.routes import openai_api

    return openai_api(parts, chats)


def _vllm_series(model_name: str, max_sequence_length: int) -> "MakeAliases":
    from tgis.router.api.vllm.series import VllmSeries

    return partial(VllmSeries, model_name, max_sequence_length)


INTERFACE = Interface(
    rules=OPENAI,
    build_http_api=_build_http_api,
    build_chat_api=_build_chat_api,
    accompanies_others=True,
    option_names=OPTIONS,
    metric_aliases={"vllm": _vllm_series},
)
