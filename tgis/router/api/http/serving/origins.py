"""Refuses requests from pages of other origins. A browser sends a page's simple requests to any address that
it can reach, loopback included, without asking the service. It only hides the answer from the page."""

import re
import socket
from ipaddress import ip_address

from starlette.datastructures import Headers

from tgis.config.network import PortOptions
from tgis.router.api.http.errors import HttpError

SAFE_METHODS = ("GET", "HEAD", "OPTIONS")  # these methods change and compute nothing
OWN_SITES = ("same-origin", "none")  # `none`: the browser's user, not a page
# Names that an attacker outside of the machine and its own network cannot point to an address: names without
# a dot, and names below domains that are not delegated.
OWN_NAME = re.compile(r"[^.]*|.*\.localhost|.*\.internal")
FOREIGN_ORIGIN = "a page of another origin has sent the request; --cors-allow-origin allows origins"
FOREIGN_HOST = (
    "on a loopback address without tokens, the Host header must be an address or a name without a dot; "
    "--cors-allow-origin allows the host of an origin"
)


def is_of_page(headers: Headers) -> bool:
    """Return True if a page in a browser sent the request."""
    return "origin" in headers or "sec-fetch-site" in headers


class OriginRules:
    def __init__(self, options: PortOptions) -> None:
        given = (origin.strip().lower() for origin in (options.cors_allow_origin or "").split(","))
        self._allowed = {origin.rstrip("/") for origin in given if origin}
        self._hosts = {_name_of(origin.partition("://")[2]) for origin in self._allowed}
        self._hosts.add(socket.gethostname().lower())
        is_open = not (options.auth_tokens_path or options.tls_client_ca_cert_path)
        self._checks_host = is_open and _is_loopback(options.bind) and "*" not in self._allowed

    def check(self, method: str, headers: Headers) -> None:
        """Raise HttpError for a request that its page may not send."""
        if self._checks_host and not all(map(self._is_own_host, headers.getlist("host"))):
            raise HttpError(403, FOREIGN_HOST)
        if method not in SAFE_METHODS and not self._may_change(headers):
            raise HttpError(403, FOREIGN_ORIGIN)

    def _may_change(self, headers: Headers) -> bool:
        """Return True for a request from no page, this service's page, or a page of an allowed origin."""
        origins = [origin.lower() for origin in headers.getlist("origin")]
        if "*" in self._allowed or (origins and self._allowed.issuperset(origins)):
            return True
        site = headers.get("sec-fetch-site")  # browsers that know this header let no page write it
        if site is not None:
            return site in OWN_SITES
        host = headers.get("host", "").lower()
        return all(origin.partition("://")[2] == host for origin in origins)

    def _is_own_host(self, host: str) -> bool:
        """Return True if an attacker cannot point this name to the service (DNS rebinding)."""
        name = _name_of(host.lower())
        return _is_address(name) or name in self._hosts or OWN_NAME.fullmatch(name) is not None


def _name_of(host: str) -> str:
    """Return a host without its port and brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].rstrip(".")


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _is_loopback(bind: str) -> bool:
    return bind == "localhost" or (_is_address(bind) and ip_address(bind).is_loopback)
