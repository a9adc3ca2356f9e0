"""Receives steps from the router and sends their answers."""

import logging
import select
import threading

from tgis import failpoints
from tgis.net.framing import FrameReader, frame
from tgis.pb import shard_pb2 as pb
from tgis.shard.transport.link import StepConnection, StepListener

logger = logging.getLogger(__name__)

READ_BYTES = 1 << 18
GARBAGE = frame(pb.StepResponse(step_id=1 << 63, rows=b"garbage"))  # no router accepts this as an answer


class StepSocket:
    """Stream of steps from the router that connected last. A new connection replaces the previous one.

    `send` may run on a different thread than the other methods."""

    def __init__(self, listener: StepListener) -> None:
        self._listener = listener
        self._poll = select.poll()
        self._poll.register(listener, select.POLLIN)
        self._connection: StepConnection | None = None
        self._in_use = threading.Lock()  # of the connection
        self._frames = FrameReader()

    def receive(self) -> list[pb.StepRequest] | None:
        """Wait for steps. Return None if a new stream waits for `accept`."""
        while True:
            ready = {number for number, _ in self._poll.poll()}
            if self._listener.fileno() in ready:
                return None
            with self._in_use:
                data = self._read()
            if requests := [pb.StepRequest.FromString(body) for body in self._frames.push(data)]:
                return requests

    def accept(self) -> None:
        """Begin the new stream. No step of the previous stream may be pending."""
        with self._in_use:
            if self._connection is not None:
                self._end("a newer connection replaces this one")
            self._connection = self._listener.accept()
            self._frames = FrameReader()
            self._poll.register(self._connection, select.POLLIN)

    def send(self, response: pb.StepResponse) -> None:
        with self._in_use:
            if self._connection is None:
                return  # the router is gone, and nobody waits for the answer
            try:
                is_garbage = failpoints.hit("shard.before_answer")
                self._connection.sendall(GARBAGE if is_garbage else frame(response))
            except OSError as error:
                self._end(error)

    def _read(self) -> bytes:
        if self._connection is None:
            return b""  # closed after it became readable
        try:
            data = self._connection.recv(READ_BYTES)
        except BlockingIOError:
            return b""
        except OSError as error:
            self._end(error)
            return b""
        if not data:
            self._end("it closed the connection, as it does whenever it stops")
        return data

    def _end(self, reason: object) -> None:
        assert self._connection is not None
        logger.info("router disconnected: %s", reason)
        self._poll.unregister(self._connection)
        self._connection.close()
        self._connection = None
