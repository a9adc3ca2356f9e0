"""Steps and their answers on their way between a router and a shard: messages on a Unix socket of their own,
each behind its length. Thus a step costs a few system calls and wakes no thread but its receiver."""

import struct

from google.protobuf.message import Message

_LENGTH = struct.Struct("<I")
MAX_LENGTH = 1 << 30  # bytes of a message


def steps_path(path: str) -> str:
    """The socket of the steps of the shard whose calls are answered at `path`."""
    return f"{path}.steps"


def frame(message: Message) -> bytes:
    body = message.SerializeToString()
    return _LENGTH.pack(len(body)) + body


class FrameError(Exception):
    """What arrives is not what the other end sends."""


class FrameReader:
    """Cuts what arrives into messages."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def push(self, data: bytes) -> list[bytes]:
        """The messages that `data` completes, serialized. Raises FrameError."""
        pending, start, bodies = self._pending, 0, []
        pending += data
        while len(pending) >= start + _LENGTH.size:
            begin = start + _LENGTH.size
            [length] = _LENGTH.unpack_from(pending, start)
            if length > MAX_LENGTH:
                raise FrameError
            end = begin + length
            if end > len(pending):
                break
            bodies.append(bytes(pending[begin:end]))
            start = end
        del pending[:start]
        return bodies
