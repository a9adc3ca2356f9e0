"""Describes LMI's API."""

from typing import TYPE_CHECKING

from tgis.router.api.interface import Interface
from tgis.router.api.lmi.options.outcomes import OPTIONS
from tgis.router.api.lmi.rules import LMI

if TYPE_CHECKING:
    from tgis.router.api.http.chat_api import ChatApi
    from tgis.router.api.http.http_api import HttpApi
    from tgis.router.api.http.service_parts import ServiceParts


def _build_http_api(parts: "ServiceParts", chats: "ChatApi") -> "HttpApi":
    from tgis.router.api.lmi.routes import lmi_api

    return lmi_api(parts, chats)


INTERFACE = Interface(
    rules=LMI,
    build_http_api=_build_http_api,
    option_names=OPTIONS,
)
