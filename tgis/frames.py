"""Steps and their answers on their way between a router and a shard: messages on a Unix socket of their own,
each behind its length. Thus a step costs a few system calls and wakes no thread but its receiver."""

import struct

from google.protobuf.message import Message

_LENGTH = struct.Struct("<I")


def steps_path(path: str) -> str:
    """The socket of the steps of the shard whose calls are answered at `path`."""
    return f"{path}.steps"


def frame(message: Message) -> bytes:
    body = message.SerializeToString()
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Cuts what arrives into messages."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def push(self, data: bytes) -> list[bytes]:
        """The messages that `data` completes, serialized."""
        pending, start, bodies = self._pending, 0, []
        pending += data
        while len(pending) >= start + _LENGTH.size:
            begin = start + _LENGTH.size
            end = begin + _LENGTH.unpack_from(pending, start)[0]
            if end > len(pending):
                break
            bodies.append(bytes(pending[begin:end]))
            start = end
        del pending[:start]
        return bodies
