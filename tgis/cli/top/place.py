"""Finds the service to watch: the given one, that of the variables, or the one that runs on this machine."""

from dataclasses import dataclass

from tgis.cli.top.scrape import ScrapeError, Source, Trust
from tgis.config.option import option
from tgis.net.addresses import http_url, local_host
from tgis.process.run_directory import running_urls

DEFAULT_TARGET = "localhost:3000"
HINT = "name another service with --target HOST:PORT"


@dataclass(frozen=True, kw_only=True)
class Place(Trust):
    target: str | None = option(
        "Host and port of the service's HTTP port, or its URL; unset: --port on this machine.",
        None,
        env=False,
    )
    port: int | None = option(
        "HTTP port of the service on this machine; unset or 0: the one of the service that this user runs "
        "here, else 3000.",
        None,
        short="-p",
        minimum=0,
        maximum=65535,
    )
    bind: str = option(
        "Address the service with this port listens on; one that means all of them means loopback.", "0.0.0.0"
    )
    http_tls: bool = option("It serves that port with TLS.", False)

    @property
    def hint(self) -> str:
        """Advice to add to a failure, because another service may be meant; empty if one was named."""
        return HINT if self.target is None else ""

    @property
    def shown(self) -> str:
        return self.target or "this machine"


def locate(place: Place) -> Source:
    """Return the service to watch. Raises ScrapeError if it must be chosen from several."""
    return Source(place.target or _local_target(place), place)


def _local_target(place: Place) -> str:
    if place.port:
        return http_url(local_host(place.bind), place.port, place.http_tls)
    urls = running_urls()
    if len(urls) > 1:
        raise ScrapeError(f"several services run here: {', '.join(urls)}")
    return urls[0] if urls else DEFAULT_TARGET
