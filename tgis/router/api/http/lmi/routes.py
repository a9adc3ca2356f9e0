"""Routes of LMI's API."""

from collections.abc import Callable

from tgis.router.api.http.http_api import HttpApi
from tgis.router.api.http.lmi.errors import LMI_ERRORS
from tgis.router.api.http.openai.service_parts import OpenAiApi
from tgis.router.requests.doors import LMI


def lmi_api(api: OpenAiApi, is_ready: Callable[[], bool]) -> HttpApi:
    return HttpApi(LMI, (), LMI_ERRORS)
