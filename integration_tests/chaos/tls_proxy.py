"""Proxy through which unencrypted attackers reach a TLS port."""

import asyncio
import contextlib
import ssl
import threading


class TlsProxy:
    """Serve a loopback port that forwards to `target` over TLS."""

    def __init__(self, target: tuple[str, int], context: ssl.SSLContext) -> None:
        self._target, self._context = target, context
        self._loop = asyncio.new_event_loop()
        self._relays: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        serving = asyncio.run_coroutine_threadsafe(
            asyncio.start_server(self._relay, "127.0.0.1", 0), self._loop
        )
        self._server = serving.result(10)
        self.port: int = self._server.sockets[0].getsockname()[1]

    def close(self) -> None:
        """Close the connection; repeated calls have no effect."""
        if not self._loop.is_closed():
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(10)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def _end(self) -> None:
        self._server.close()
        for relay in self._relays:
            relay.cancel()
        await asyncio.gather(*self._relays)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._relays.add(task)  # no other reference exists
        task.add_done_callback(self._relays.discard)
        with contextlib.suppress(OSError, asyncio.CancelledError):  # either end may disconnect at any time
            far_reader, far_writer = await asyncio.open_connection(*self._target, ssl=self._context)
            await asyncio.gather(_pump(reader, far_writer), _pump(far_reader, writer))
        writer.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Forward until either end disconnects, then close the other."""
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()
