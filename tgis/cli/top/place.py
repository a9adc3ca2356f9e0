"""Locates the service to watch: by --target, by the service's variables, or on this machine."""

from dataclasses import dataclass

from tgis.cli.top.scrape import ScrapeError, Source, Trust
from tgis.config.option import option
from tgis.net.addresses import http_url, local_host
from tgis.process.run_directory import running_urls

DEFAULT_PORT = 3000
HINT = "select another service with --target HOST:PORT"


@dataclass(frozen=True, kw_only=True)
class ServicePlace(Trust):
    target: str | None = option(
        "Host and HTTP port of the service (by default 3000), or its URL; unset: --port on this machine.",
        None,
        env=False,
    )
    port: int | None = option(
        "HTTP port of a service on this machine; unset or 0: the port of the service that this user runs "
        "here, else 3000.",
        None,
        short="-p",
        minimum=0,
        maximum=65535,
    )
    bind: str = option(
        "Address on which the service of --port listens; for an address such as 0.0.0.0, loopback is used.",
        "0.0.0.0",
    )
    http_tls: bool = option("Connect to --port with TLS.", False)

    @property
    def hint(self) -> str:
        """Advice to add to a failure; empty if --target was given."""
        return HINT if self.target is None else ""

    @property
    def shown(self) -> str:
        return self.target or "this machine"


def locate(place: ServicePlace) -> Source:
    """Return the service to watch. Raises ScrapeError if several services run here."""
    return Source(_with_port(place.target) if place.target else _local_target(place), place)


def _with_port(target: str) -> str:
    """Return a target that is a host with its port. URLs have their own default ports."""
    is_host = "://" not in target and ":" not in target.rpartition("]")[2]
    return f"{target}:{DEFAULT_PORT}" if is_host else target


def _local_target(place: ServicePlace) -> str:
    if place.port:
        return http_url(local_host(place.bind), place.port, place.http_tls)
    urls = running_urls()
    if len(urls) > 1:
        raise ScrapeError(f"several services run here: {', '.join(urls)}")
    return urls[0] if urls else f"localhost:{DEFAULT_PORT}"
