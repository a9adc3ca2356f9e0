"""Frames the messages between router and shard, and between router worker and engine process, by length.

The socket carries nothing else, so a step needs few system calls and wakes only its receiver."""

import struct

from google.protobuf.message import Message

_LENGTH = struct.Struct("<I")
MAX_LENGTH = 1 << 30  # bytes of a message


def steps_path(path: str) -> str:
    """Return the path of the socket for steps of the shard whose socket for calls is `path`."""
    return f"{path}.steps"


def frame(message: Message) -> bytes:
    return frame_body(message.SerializeToString())


def frame_body(body: bytes) -> bytes:
    return _LENGTH.pack(len(body)) + body


class FrameError(Exception):
    """Error for data that is not a sequence of frames."""


class FrameReader:
    def __init__(self) -> None:
        self._pending = bytearray()

    def push(self, data: bytes) -> list[bytes]:
        """Return the serialized messages that `data` completes. Raises FrameError."""
        pending = self._pending
        if not pending and len(data) >= _LENGTH.size:
            [length] = _LENGTH.unpack_from(data)
            if len(data) == _LENGTH.size + length <= MAX_LENGTH:  # the usual case: one whole message
                return [data[_LENGTH.size :]]
        pending += data
        start = 0
        bodies = []
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
