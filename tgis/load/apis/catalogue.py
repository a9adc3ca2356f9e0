"""Lists the APIs by the names of `--api`."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from urllib.parse import urlsplit

from tgis.load.apis.interface import ApiClient, LoadTarget
from tgis.load.errors import LoadError


def _fmaas(target: LoadTarget) -> ApiClient:
    from tgis.load.apis.fmaas import FmaasClient

    return FmaasClient(target)


def _openai(target: LoadTarget, is_chat: bool) -> ApiClient:
    from tgis.load.apis.openai import OpenAiClient

    return OpenAiClient(target, is_chat)


def _tgi(target: LoadTarget) -> ApiClient:
    from tgis.load.apis.tgi import TgiClient

    return TgiClient(target)


def _lmi(target: LoadTarget) -> ApiClient:
    from tgis.load.apis.lmi import LmiClient

    return LmiClient(target)


def _engine(target: LoadTarget) -> ApiClient:
    from tgis.load.apis.engine import EngineApiClient

    return EngineApiClient(target)


# Each imports its client when it is called, because the names are options of the command.
APIS: dict[str, Callable[[LoadTarget], ApiClient]] = {
    "fmaas": _fmaas,
    "completions": partial(_openai, is_chat=False),
    "chat": partial(_openai, is_chat=True),
    "tgi": _tgi,
    "lmi": _lmi,
    "engine": _engine,
}
HTTP_APIS = ("completions", "chat", "tgi", "lmi")
DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True)
class Endpoint:
    api: str
    target: LoadTarget


def choose_api(given: str, api: str | None, credentials: LoadTarget) -> Endpoint:
    """Read HOST:PORT or a URL. Without `api`, a URL means chats and HOST:PORT fmaas. Raises LoadError."""
    if "://" not in given:
        _check_address(given)
        return Endpoint(api or "fmaas", replace(credentials, address=given))
    url = urlsplit(given)
    if url.scheme not in DEFAULT_PORTS or not url.hostname:
        raise LoadError(f"{given!r} is neither HOST:PORT nor an http or https URL")
    if api is not None and api not in HTTP_APIS:
        raise LoadError(f"a URL needs one of the HTTP APIs, {', '.join(HTTP_APIS)}; {api} needs HOST:PORT")
    address = f"{url.hostname}:{url.port or DEFAULT_PORTS[url.scheme]}"
    path = url.path.rstrip("/").removesuffix("/v1")
    is_tls = url.scheme == "https"
    if credentials.is_tls and not is_tls:
        raise LoadError(f"{given!r} is a URL without TLS; write https")
    return Endpoint(api or "chat", replace(credentials, address=address, path=path, is_tls=is_tls))


def _check_address(address: str) -> None:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise LoadError(f"{address!r} is neither HOST:PORT nor an http or https URL")
