"""What launchers of different nodes say to each other: JSON, a line for each message, and a sign of life a
second in both directions. Who is silent for ten of them is lost."""

import asyncio
import json
from typing import Any

from tgis.net.addresses import tune
from tgis.process.heartbeat import MAX_MISSED, PERIOD_S

MAX_LINE_BYTES = 1 << 16
BEAT = b"\n"

Message = dict[str, Any]


class ChannelLostError(Exception):
    """The other end is gone; the text says how that was noticed."""


class Channel:
    """Over a connection that is encrypted, and whose other end has shown a certificate."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Gives signs of life until it is closed."""
        self._reader, self._writer = reader, writer
        self._missed = 0
        tune(writer.get_extra_info("socket"))
        self.own_host, self.other_host = (
            str(writer.get_extra_info(name)[0]) for name in ("sockname", "peername")
        )
        """The addresses of both ends."""
        self._beating = asyncio.create_task(self._beat(), name="signs of life")

    def send(self, kind: str, **more: Any) -> None:
        """Nowhere if the other end is gone, which `receive` tells."""
        self._write(json.dumps({"kind": kind, **more}).encode() + b"\n")

    async def receive(self) -> Message:
        """The next message, which has a kind. Raises ChannelLostError, also where something else comes."""
        while True:
            try:
                line = await self._reader.readline()
                message = json.loads(line) if line.strip() else None
            except (OSError, ValueError) as error:  # the second also of a line that is too long
                raise ChannelLostError(str(error) or type(error).__name__) from error
            if not line:
                is_silent = self._missed >= MAX_MISSED
                raise ChannelLostError(
                    f"silent for {MAX_MISSED * PERIOD_S:g} s" if is_silent else "the connection was closed"
                )
            self._missed = 0
            if message is not None:
                if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
                    raise ChannelLostError("what came is no message")
                return message

    def close(self) -> None:
        """What was sent before still leaves, if the other end takes it."""
        self._beating.cancel()
        self._writer.close()

    def _write(self, data: bytes) -> None:
        if not self._writer.is_closing():
            self._writer.write(data)

    async def _beat(self) -> None:
        """Ends the connection when the other end has been silent for too long: that is counted in beats of
        this process, so that time in which it stood still is none."""
        while self._missed < MAX_MISSED:
            await asyncio.sleep(PERIOD_S)
            self._missed += 1
            self._write(BEAT)
        self._writer.transport.abort()
