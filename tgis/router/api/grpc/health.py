"""Serves gRPC's health service, and holds the state that it and HTTP's `/health` report. A watcher that does
not read does not delay the others. The service that gRPC provides notifies one watcher after the other."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
from grpc_health.v1 import health_pb2 as pb
from grpc_health.v1.health_pb2_grpc import HealthServicer

logger = logging.getLogger(__name__)

NAME = "grpc.health.v1.Health"
# Kubernetes' default for a liveness probe: three failures, ten seconds apart.
LIVENESS_PROBE_S = 30.0

Context = grpc.aio.ServicerContext[Any, Any]


class Health(HealthServicer):  # type: ignore[misc]
    """Health of services that are ready together, from `set` until `drain`. The empty name means all."""

    def __init__(self, *services: str) -> None:
        self._services = ("", *services)
        self._changed = asyncio.Event()
        self._draining = asyncio.Event()
        self._lost_at: float | None = None
        self.is_ready = False
        self.num_watches = 0

    def set(self, is_ready: bool) -> None:
        """Record whether the shards are ready."""
        self._update(is_ready and not self._draining.is_set())
        if not is_ready:
            self._lost_at = time.monotonic()
        elif self._lost_at is not None:
            _log_recovery(time.monotonic() - self._lost_at)
            self._lost_at = None

    def drain(self) -> None:
        """Set the health to not ready permanently."""
        self._draining.set()
        self._update(False)

    async def Check(self, request: pb.HealthCheckRequest, context: Context) -> pb.HealthCheckResponse:
        if request.service not in self._services:
            await context.abort(grpc.StatusCode.NOT_FOUND)
        return pb.HealthCheckResponse(status=self._status)

    async def List(self, request: pb.HealthListRequest, context: Context) -> pb.HealthListResponse:
        status = pb.HealthCheckResponse(status=self._status)
        return pb.HealthListResponse(statuses=dict.fromkeys(self._services, status))

    async def Watch(
        self, request: pb.HealthCheckRequest, context: Context
    ) -> AsyncGenerator[pb.HealthCheckResponse, None]:
        """Yield each new status. Statuses that are replaced before the client reads them are skipped. The
        status after `drain` is the last one."""
        with self.watching():
            async for status in self._statuses(request.service in self._services):
                yield pb.HealthCheckResponse(status=status)

    @contextmanager
    def watching(self) -> Iterator[asyncio.Event]:
        """Count a client that watches the health, also through another method, while the context is open.
        Yield the event that `drain` sets."""
        self.num_watches += 1
        try:
            yield self._draining
        finally:
            self.num_watches -= 1

    async def _statuses(self, is_known: bool) -> AsyncGenerator[Any, None]:
        sent = None
        while True:
            # Read both together, so that a change or a drain while a status is sent is reported afterwards.
            changed = self._changed
            is_draining = self._draining.is_set()
            status = self._status if is_known else pb.HealthCheckResponse.SERVICE_UNKNOWN
            if status != sent:
                sent = status
                yield status
            if is_draining:
                return
            await changed.wait()

    @property
    def _status(self) -> Any:
        status = pb.HealthCheckResponse
        return status.SERVING if self.is_ready else status.NOT_SERVING

    def _update(self, is_ready: bool) -> None:
        self.is_ready = is_ready
        self._changed.set()
        self._changed = asyncio.Event()


def _log_recovery(seconds: float) -> None:
    if seconds <= LIVENESS_PROBE_S:
        logger.info("ready again after %.1f s", seconds)
    else:
        logger.warning(
            "ready again after %.1f s; a liveness probe of /health or of gRPC's health would have killed "
            "this process meanwhile, so let liveness probes ask for /live",
            seconds,
        )
