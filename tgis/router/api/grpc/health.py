"""gRPC's health service. A watcher that does not read delays no other watcher; the service that comes with
gRPC notifies one watcher after the other."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import grpc
from grpc_health.v1 import health_pb2 as pb
from grpc_health.v1.health_pb2_grpc import HealthServicer

NAME = "grpc.health.v1.Health"

Context = grpc.aio.ServicerContext[Any, Any]


class Health(HealthServicer):  # type: ignore[misc]
    """Health of services that are ready or not together. The empty name stands for all of them."""

    def __init__(self, *services: str) -> None:
        self._services = ("", *services)
        self._status = pb.HealthCheckResponse.NOT_SERVING
        self._changed = asyncio.Event()
        self._has_ended = False
        self.num_watches = 0

    def set(self, is_ready: bool) -> None:
        status = pb.HealthCheckResponse
        self._status = status.SERVING if is_ready and not self._has_ended else status.NOT_SERVING
        self._changed.set()
        self._changed = asyncio.Event()

    def end(self) -> None:
        """Set the health to not ready for good."""
        self._has_ended = True
        self.set(False)

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
        """Yield every status from now on, except those that another one replaces before they are read. After
        the end, yield the last status and return."""
        self.num_watches += 1
        try:
            async for status in self._statuses(request.service in self._services):
                yield pb.HealthCheckResponse(status=status)
        finally:
            self.num_watches -= 1

    async def _statuses(self, is_known: bool) -> AsyncGenerator[Any, None]:
        told = None
        while True:
            # Read both at one moment, so that a change or an end while a status is being sent is reported
            # after it.
            changed, has_ended = self._changed, self._has_ended
            status = self._status if is_known else pb.HealthCheckResponse.SERVICE_UNKNOWN
            if status != told:
                told = status
                yield status
            if has_ended:
                return
            await changed.wait()
