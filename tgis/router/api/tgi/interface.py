"""Describes TGI's API."""

from typing import TYPE_CHECKING

from tgis.router.api.interface import Interface
from tgis.router.api.tgi.options.names import OPTIONS
from tgis.router.api.tgi.rules import TGI

if TYPE_CHECKING:
    from tgis.router.api.http.chat_api import ChatApi
    from tgis.router.api.http.http_api import HttpApi
    from tgis.router.api.http.service_parts import ServiceParts


def _build_http_api(parts: "ServiceParts", chats: "ChatApi") -> "HttpApi":
    from tgis.router.api.tgi.routes import tgi_api

    return tgi_api(parts, chats)


INTERFACE = Interface(
    rules=TGI,
    build_http_api=_build_http_api,
    option_names=OPTIONS,
    model_placeholders=("dummy", "text-generation-inference", "tgi", "default"),
)
