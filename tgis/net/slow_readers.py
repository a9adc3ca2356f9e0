"""Ends what is sent to clients that do not read it."""

from uvicorn.protocols.http.flow_control import FlowControl


class SlowReadError(Exception):
    """Error of sending to a client that has not read for too long. Its connection ends."""


class Flow(FlowControl):
    """Flow control of a connection, whose writers fail once its client is given up."""

    is_slow = False

    def give_up(self) -> None:
        self.is_slow = True
        self._is_writable_event.set()

    async def drain(self) -> None:
        await super().drain()
        if self.is_slow:
            raise SlowReadError
