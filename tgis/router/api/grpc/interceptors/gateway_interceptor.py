"""Reads the tenant of a call from the metadata key that the operator's gateway sets."""

from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from tgis.router.api.tenants import gateway_name, token_holder

Handler = Any  # grpc types its handlers for the synchronous server only


class GatewayInterceptor(grpc.aio.ServerInterceptor):
    def __init__(self, key: str) -> None:
        self._key = key

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        metadata = handler_call_details.invocation_metadata or ()
        if name := gateway_name(value for key, value in metadata if key == self._key):
            token_holder.set(token_holder.get()._replace(tenant=name))
        return await continuation(handler_call_details)
