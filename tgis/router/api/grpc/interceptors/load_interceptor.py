"""Adds a report of the load to the trailing metadata of successful calls whose clients ask for it."""

from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from tgis.router.api.grpc.call_status import Context
from tgis.router.api.load_reports import (
    BINARY_KEY,
    KEY,
    LoadFormat,
    LoadReports,
    requested_format,
    write_report,
)

Handler = Any  # grpc types its handlers for the synchronous server only


class LoadInterceptor(grpc.aio.ServerInterceptor):
    """Interceptor around the error interceptor, whose methods are coroutines of one request."""

    def __init__(self, reports: LoadReports) -> None:
        self._reports = reports

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        handler = await continuation(handler_call_details)
        form = requested_format(handler_call_details.invocation_metadata or ())
        if form is None:
            return handler
        if handler.unary_unary:
            make, method = grpc.unary_unary_rpc_method_handler, handler.unary_unary
        elif handler.unary_stream:
            make, method = grpc.unary_stream_rpc_method_handler, handler.unary_stream
        else:
            return handler
        return make(
            self._wrap(method, form),
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )

    def _wrap(self, method: Callable[[Any, Context], Awaitable[Any]], form: LoadFormat) -> Any:
        async def call(request: Any, context: Context) -> Any:
            answer = await method(request, context)
            if not context.done():  # a failed call has ended
                await self._add_report(context, form)
            return answer

        return call

    async def _add_report(self, context: Context, form: LoadFormat) -> None:
        report = await self._reports.read()
        entry: tuple[str, str | bytes] = (KEY, write_report(report, form))
        if form is LoadFormat.BIN:
            entry = BINARY_KEY, report.SerializeToString()
        context.set_trailing_metadata((*(context.trailing_metadata() or ()), entry))
