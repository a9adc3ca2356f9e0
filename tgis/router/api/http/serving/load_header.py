"""Adds a header with the service's load to successful responses whose clients ask for it."""

from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tgis.router.api.http.answers.event_stream import BEGIN
from tgis.router.api.load_reports import (
    KEY,
    REQUEST_KEY,
    LoadReports,
    requested_format,
    write_report,
)


@dataclass
class LoadHeader:
    """ASGI application that adds the header to the responses of `app`."""

    app: ASGIApp
    reports: LoadReports

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = ((REQUEST_KEY, value) for name, value in scope["headers"] if name == REQUEST_KEY.encode())
        form = requested_format(given)
        if form is None:
            await self.app(scope, receive, send)
            return

        async def send_with_load(message: Message) -> None:
            if message["type"] == BEGIN and message["status"] < 400:
                report = write_report(await self.reports.read(), form)
                message["headers"] = [*message["headers"], (KEY.encode(), report.encode())]
            await send(message)

        await self.app(scope, receive, send_with_load)
