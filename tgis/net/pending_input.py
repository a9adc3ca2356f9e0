"""Bytes of a connection that its parser has not had yet, cut into pieces that end few requests each."""

MAX_PIECE = 4 << 10
"""Bytes of a piece that may hold whole requests."""
MAX_BODY_PIECE = 64 << 10
END_OF_HEADERS = b"\r\n\r\n"


class PendingInput:
    def __init__(self) -> None:
        self._data, self._at = b"", 0

    def __len__(self) -> int:
        return len(self._data) - self._at

    def add(self, data: bytes) -> None:
        self._data, self._at = self._data[self._at :] + data if self else data, 0

    def give_back(self, num_bytes: int) -> None:
        """Put the end of the last piece back."""
        self._at -= num_bytes

    def clear(self) -> None:
        self._data, self._at = b"", 0

    def take(self, num_body: int) -> bytes:
        """Return the next piece. `num_body` is the number of bytes that are of a body; if it is 0, the piece
        ends with a request's headers, or is small."""
        if num_body:
            end = self._at + min(num_body, MAX_BODY_PIECE)
        else:
            end = self._at + MAX_PIECE
            found = self._data.find(END_OF_HEADERS, self._at, end)
            end = end if found < 0 else found + len(END_OF_HEADERS)
        piece = self._data[self._at : end]
        self._at += len(piece)
        return piece
