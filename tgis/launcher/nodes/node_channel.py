"""Connects the launchers of different nodes. Each line is a JSON message or an empty heartbeat."""

import asyncio
import json
from typing import Any

from tgis.net.addresses import configure_socket
from tgis.process.heartbeat import MAX_MISSED, PERIOD_S

MAX_LINE_BYTES = 1 << 16
HEARTBEAT = b"\n"

Message = dict[str, Any]


class ChannelLostError(Exception):
    """Error for a lost connection; its text is the reason."""


class Channel:
    """Channel of messages over a connection with mutual TLS."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Start to send heartbeats, which continue until `close`."""
        self._reader = reader
        self._writer = writer
        self._missed = 0
        configure_socket(writer.get_extra_info("socket"))
        self.own_host, self.other_host = (
            str(writer.get_extra_info(name)[0]) for name in ("sockname", "peername")
        )
        self._heartbeats = asyncio.create_task(self._send_heartbeats(), name="heartbeats")

    def send(self, kind: str, **more: Any) -> None:
        """Send a message. If the connection is lost, the message is dropped and `receive` reports the
        loss."""
        self._write(json.dumps({"kind": kind, **more}).encode() + b"\n")

    async def receive(self) -> Message:
        """Return the next message. Raises ChannelLostError, also for a line that is not a message."""
        while True:
            try:
                line = await self._reader.readline()
                message = json.loads(line) if line.strip() else None
            except (OSError, ValueError) as error:  # a line that is too long also raises ValueError
                raise ChannelLostError(str(error) or type(error).__name__) from error
            if not line:
                is_silent = self._missed >= MAX_MISSED
                raise ChannelLostError(
                    f"silent for {MAX_MISSED * PERIOD_S:g} s" if is_silent else "the connection was closed"
                )
            self._missed = 0
            if message is not None:
                if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
                    raise ChannelLostError("received a line that is not a message")
                return message

    def close(self) -> None:
        """Close the channel after delivering the messages sent before."""
        self._heartbeats.cancel()
        self._writer.close()

    def abort(self) -> None:
        """Close the channel without waiting for the peer."""
        self._writer.transport.abort()

    def _write(self, data: bytes) -> None:
        if not self._writer.is_closing():
            self._writer.write(data)

    async def _send_heartbeats(self) -> None:
        """Send heartbeats, and abort the connection when the peer has been silent for too long.

        Silence is counted in heartbeats, so time during which this process was suspended does not count."""
        while self._missed < MAX_MISSED:
            await asyncio.sleep(PERIOD_S)
            self._missed += 1
            self._write(HEARTBEAT)
        self.abort()
