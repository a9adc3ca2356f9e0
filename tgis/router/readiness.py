"""Whether calls are served, as gRPC's health, its watchers and HTTP are told. Who is told is told at once."""

import asyncio
import logging
import time
from collections.abc import Callable

from grpc_health.v1 import health
from grpc_health.v1.health_pb2 import HealthCheckResponse, HealthListRequest, HealthListResponse

logger = logging.getLogger(__name__)

# What Kubernetes gives a liveness probe where nothing else is said: three failures, ten seconds apart.
PATIENCE_S = 30.0


class _Health(health.aio.HealthServicer):  # type: ignore[misc]  # it has no types
    """With the call that its library leaves out."""

    def __init__(self, statuses: Callable[[], dict[str, HealthCheckResponse]]) -> None:
        super().__init__()
        self._statuses = statuses

    async def List(self, request: HealthListRequest, context: object) -> HealthListResponse:
        return HealthListResponse(statuses=self._statuses())


class Readiness:
    """Not ready until it is told otherwise; after `drain` nothing makes it ready again."""

    def __init__(self, *services: str) -> None:
        """`services` are the names that gRPC's health is asked for, beside that of the whole."""
        self.servicer = _Health(self._statuses)
        self._names = ("", *services)
        self._is_ready = self._is_draining = False
        self._lost_at: float | None = None

    @property
    def is_ready(self) -> bool:
        return self._is_ready and not self._is_draining

    def set(self, ready: bool) -> None:
        """The shards are there, or lost."""
        self._is_ready = ready
        task = asyncio.ensure_future(self.tell())
        task.add_done_callback(lambda done: done.result())
        if not ready:
            self._lost_at = time.monotonic()
        elif self._lost_at is not None:
            _log_recovery(time.monotonic() - self._lost_at)
            self._lost_at = None

    async def tell(self) -> None:
        for name, response in self._statuses().items():
            await self.servicer.set(name, response.status)

    def _statuses(self) -> dict[str, HealthCheckResponse]:
        status = HealthCheckResponse.SERVING if self.is_ready else HealthCheckResponse.NOT_SERVING
        return dict.fromkeys(self._names, HealthCheckResponse(status=status))

    async def drain(self) -> None:
        self._is_draining = True
        await self.servicer.enter_graceful_shutdown()


def _log_recovery(seconds: float) -> None:
    if seconds <= PATIENCE_S:
        logger.info("ready again after %.1f s", seconds)
    else:
        logger.warning(
            "ready again after %.1f s; a liveness probe of /health or of gRPC's health would have ended this "
            "process meanwhile, one of /live does not",
            seconds,
        )
