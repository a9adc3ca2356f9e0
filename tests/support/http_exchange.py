"""HTTP requests whose replies are returned with any status."""

import http.client
import json
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit


class HttpReply(NamedTuple):
    status: int
    headers: Mapping[str, str]
    """Headers by name in lower case."""
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def lines(self) -> list[Any]:
        return [json.loads(line) for line in self.body.splitlines()]


def exchange(
    url: str,
    body: Any = None,
    headers: Mapping[str, str] | None = None,
    method: str | None = None,
    timeout: float = 60,
) -> HttpReply:
    """Send `body`: bytes unchanged, anything else as JSON. Without a body, the method is GET.

    Headers without a value are omitted."""
    parts = urlsplit(url)
    content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    method = method or ("GET" if body is None else "POST")
    connection = http.client.HTTPConnection(parts.netloc, timeout=timeout)
    try:
        given = {"content-type": "application/json", **(headers or {})}
        path = url.removeprefix(f"http://{parts.netloc}")
        connection.request(method, path, content, {name: value for name, value in given.items() if value})
        response = connection.getresponse()
        received = {name.lower(): value for name, value in response.getheaders()}
        return HttpReply(response.status, received, response.read())
    finally:
        connection.close()
