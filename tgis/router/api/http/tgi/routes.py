"""Routes of TGI's API."""

from collections.abc import Callable

from tgis.router.api.http.http_api import HttpApi
from tgis.router.api.http.openai.service_parts import OpenAiApi
from tgis.router.api.http.tgi.errors import TGI_ERRORS
from tgis.router.requests.doors import TGI


def tgi_api(api: OpenAiApi, is_ready: Callable[[], bool]) -> HttpApi:
    return HttpApi(TGI, (), TGI_ERRORS)
