"""Readiness of the router for calls. gRPC's health, its watchers and HTTP are told of a change at once."""

import logging
import time

from tgis.router.api.grpc.health import Health

logger = logging.getLogger(__name__)

# Kubernetes' default for a liveness probe: three failures, ten seconds apart.
PATIENCE_S = 30.0


class Readiness:
    """Readiness, false until it is set; after `drain` it stays false."""

    def __init__(self, *services: str) -> None:
        """Create it. `services` are the names that gRPC's health is asked for, besides the empty one for
        all."""
        self.health = Health(*services)
        self.is_ready = self._is_draining = False
        self._lost_at: float | None = None

    def set(self, ready: bool) -> None:
        """Record that the shards are there, or lost."""
        self.is_ready = ready and not self._is_draining
        self.health.set(self.is_ready)
        if not ready:
            self._lost_at = time.monotonic()
        elif self._lost_at is not None:
            _log_recovery(time.monotonic() - self._lost_at)
            self._lost_at = None

    def drain(self) -> None:
        self._is_draining, self.is_ready = True, False
        self.health.end()


def _log_recovery(seconds: float) -> None:
    if seconds <= PATIENCE_S:
        logger.info("ready again after %.1f s", seconds)
    else:
        logger.warning(
            "ready again after %.1f s; a liveness probe of /health or of gRPC's health would have ended this "
            "process meanwhile, one of /live does not",
            seconds,
        )
