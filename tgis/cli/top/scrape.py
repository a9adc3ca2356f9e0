"""Scrapes and parses `/metrics` of a running service. Every failure is a ScrapeError of one line."""

import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families

from tgis.config.option import option
from tgis.errors import OperatorError

TIMEOUT_S = 5.0
MAX_BYTES = 64 << 20  # maximum size of a response; this service's has less than 1 MiB
OURS = "tgi_queue_size"  # series that identifies this service

Labels = frozenset[tuple[str, str]]


class ScrapeError(OperatorError):
    """Error when there is no response, or the response is not from this service."""


@dataclass(frozen=True, kw_only=True)
class Trust:
    tls: bool = option("Use TLS; without --ca-cert, the system's CAs are trusted.", False, env=False)
    ca_cert: str | None = option("PEM file of the CAs to trust; implies --tls.", None, env=False)
    server_name: str | None = option(
        "Host name expected in the certificate; implies --tls; unset: the target's host.", None, env=False
    )


@dataclass(frozen=True)
class Source:
    target: str
    """Host and port, or a URL."""
    trust: Trust


@dataclass(frozen=True, eq=False)
class Scrape:
    at: float
    """Time of the scrape on the monotonic clock, in seconds."""
    samples: Mapping[str, Mapping[Labels, float]]

    def select(self, name: str, **labels: str) -> dict[Labels, float]:
        """Return the samples that have all the labels."""
        wanted = frozenset(labels.items())
        return {given: value for given, value in self.samples.get(name, {}).items() if wanted <= given}

    def value(self, name: str, **labels: str) -> float:
        """Return the sum of the samples that have all the labels; 0 if there are none."""
        return sum(self.select(name, **labels).values())


def scrape(source: Source) -> Scrape:
    """Scrape `/metrics` of the service. Raises ScrapeError."""
    text = _get(source)
    try:
        samples = parse(text)
    except ValueError as error:
        raise ScrapeError(f"the response is not in Prometheus' format: {error}") from error
    if OURS not in samples:
        raise ScrapeError(f"the response has no {OURS}: this is another service")
    return Scrape(time.monotonic(), samples)


def parse(text: str) -> dict[str, dict[Labels, float]]:
    """Return the samples by name and labels. Raises ValueError."""
    samples: dict[str, dict[Labels, float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples.setdefault(sample.name, {})[frozenset(sample.labels.items())] = sample.value
    return samples


def _get(source: Source) -> str:
    connection = _connection(source)
    try:
        connection.request("GET", "/metrics")
        response = connection.getresponse()
        body = response.read(MAX_BYTES)
        text = body.decode()
    except ssl.SSLError as error:
        raise ScrapeError(f"TLS: {error.reason or error}") from error
    except OSError as error:
        raise ScrapeError(error.strerror or str(error) or type(error).__name__) from error
    except (HTTPException, UnicodeDecodeError) as error:
        raise ScrapeError(f"the response is not HTTP: {type(error).__name__}") from error
    finally:
        connection.close()
    if response.status != 200:
        raise ScrapeError(f"/metrics returns status {response.status}")
    return text


def _connection(source: Source) -> HTTPConnection:
    """Return an unopened connection. Raises ScrapeError if the target or --ca-cert cannot be used."""
    trust = source.trust
    url = urlsplit(source.target if "://" in source.target else f"http://{source.target}")
    if url.scheme not in ("http", "https") or not url.netloc:
        raise ScrapeError("neither host and port nor an http or https URL")
    try:
        if url.scheme == "http" and not (trust.tls or trust.ca_cert or trust.server_name):
            return HTTPConnection(url.netloc, timeout=TIMEOUT_S)
        return _Tls(url.netloc, _context(trust), trust.server_name)
    except HTTPException as error:
        raise ScrapeError("the port is not a number") from error


def _context(trust: Trust) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=trust.ca_cert)
    except OSError as error:
        raise ScrapeError(f"{trust.ca_cert} cannot be read: {error.strerror or error}") from error


class _Tls(HTTPSConnection):
    """HTTPS connection that can expect another host name than the target's, as a forwarded port needs."""

    def __init__(self, address: str, context: ssl.SSLContext, server_name: str | None) -> None:
        super().__init__(address, timeout=TIMEOUT_S, context=context)
        self._tls = context
        self._server_name = server_name

    def connect(self) -> None:
        HTTPConnection.connect(self)
        self.sock = self._tls.wrap_socket(self.sock, server_hostname=self._server_name or self.host)
