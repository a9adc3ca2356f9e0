"""Defines what the gRPC port and the HTTP ports share."""

from dataclasses import dataclass

from tgis.net.tls import Certificates
from tgis.process.memory.release import MemoryRelease
from tgis.router.api.bearer_tokens import BearerTokens
from tgis.router.api.load_reports import LoadReports
from tgis.router.metrics.metrics import Metrics


@dataclass(frozen=True)
class PortResources:
    metrics: Metrics
    memory: MemoryRelease
    load_reports: LoadReports
    certificates: Certificates | None = None
    """Certificates of the ports, or None for ports without TLS."""
    tokens: BearerTokens | None = None
    """Tokens that calls must have, or None if calls need none."""
