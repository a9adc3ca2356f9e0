"""Checks the head of a request before an app sees it."""

import re
from collections.abc import Sequence
from http import HTTPStatus

import httptools

from tgis.net.http.pending_input import MAX_HEADER_BYTES, RefusedRequestError

HOST = re.compile(rb"(?:\[[\w:.%~!$&'()*+,;=-]+\]|[\w.%~!$&'()*+,;=-]*)(?::\d*)?", re.ASCII)
WITHOUT_HOST = ("0.9", "1.0")
"""Versions of HTTP in which a request need not have a Host header."""


def check_head(version: str, url: bytes, headers: Sequence[tuple[bytes, bytes]]) -> None:
    """Raise RefusedRequestError if the head of a request is too large, its URL has no path, or it does not
    have one valid Host header. `headers` have names in lower case."""
    num_bytes = len(url) + sum(len(name) + len(value) + 4 for name, value in headers)
    if num_bytes > MAX_HEADER_BYTES:
        raise RefusedRequestError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
    hosts = [value for name, value in headers if name == b"host"]
    if not (_has_path(url) and _is_valid(version, hosts)):
        raise RefusedRequestError(HTTPStatus.BAD_REQUEST)


def _has_path(url: bytes) -> bool:
    """Return whether a request's target is a valid URL with a path."""
    if not url.isascii():
        return False
    try:
        return httptools.parse_url(url).path is not None
    except httptools.HttpParserInvalidURLError:
        return False


def _is_valid(version: str, hosts: list[bytes]) -> bool:
    """Return whether a request may have these Host headers. Servers that choose one of several, and proxies
    that choose another one, would apply different rules to it."""
    if not hosts:
        return version in WITHOUT_HOST
    return len(hosts) == 1 and HOST.fullmatch(hosts[0].strip(b" \t")) is not None
