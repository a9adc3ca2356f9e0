"""Buffers a connection's unparsed bytes, and cuts them into pieces that complete few requests each."""

MAX_PIECE = 4 << 10
"""Maximum size of a piece that may contain complete requests."""
MAX_BODY_PIECE = 64 << 10
END_OF_HEADERS = b"\r\n\r\n"


class PendingInput:
    def __init__(self) -> None:
        self._data = b""
        self._at = 0

    def __len__(self) -> int:
        return len(self._data) - self._at

    def add(self, data: bytes) -> None:
        self._data = self._data[self._at :] + data if self else data
        self._at = 0

    def give_back(self, num_bytes: int) -> None:
        """Put the last `num_bytes` of the last piece back."""
        self._at -= num_bytes

    def clear(self) -> None:
        self._data = b""
        self._at = 0

    def take(self, num_body: int) -> bytes:
        """Return the next piece. The next `num_body` bytes belong to a body; if it is 0, the piece ends with
        a request's headers or after MAX_PIECE bytes."""
        if num_body:
            end = self._at + min(num_body, MAX_BODY_PIECE)
        else:
            end = self._at + MAX_PIECE
            index = self._data.find(END_OF_HEADERS, self._at, end)
            end = end if index < 0 else index + len(END_OF_HEADERS)
        piece = self._data[self._at : end]
        self._at += len(piece)
        return piece
