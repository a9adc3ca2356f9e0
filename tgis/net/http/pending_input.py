"""Holds a connection's unparsed bytes, and limits the size of the request that is arriving."""

from http import HTTPStatus

MAX_HEADER_BYTES = 16 << 10
MAX_FRAMING = 8  # maximum framing bytes per byte of a chunked body
MAX_LENGTH_DIGITS = 19
MAX_PIECE = 4 << 10
"""Maximum size of a piece that may contain complete requests."""
MAX_BODY_PIECE = 64 << 10
END_OF_HEADERS = b"\r\n\r\n"


class RefusedRequestError(Exception):
    """Error when a request is refused before an app sees it."""

    def __init__(self, status: HTTPStatus) -> None:
        super().__init__(status.phrase)
        self.status = status


class PendingInput:
    """Buffer of a connection's unparsed bytes, cut into pieces that complete few requests each."""

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


class RequestSize:
    """Sizes of the request that is arriving on a connection."""

    def __init__(self) -> None:
        self.num_received = 0
        """Bytes since the last complete request."""
        self.num_body_left = 0
        """Bytes of a body with a length that have not arrived."""
        self._num_body = 0

    def begin(self) -> None:
        self.num_body_left = 0

    def end(self) -> None:
        self.num_received = self.num_body_left = self._num_body = 0

    def count_received(self, num_bytes: int) -> None:
        self.num_received += num_bytes
        self.num_body_left -= min(num_bytes, self.num_body_left)

    def count_body(self, num_bytes: int) -> None:
        self._num_body += num_bytes

    def read_length(self, value: bytes) -> None:
        """Read a Content-Length header. Raises RefusedRequestError if it is not a number."""
        if not value.isdigit() or len(value) > MAX_LENGTH_DIGITS:
            raise RefusedRequestError(HTTPStatus.BAD_REQUEST)
        self.num_body_left = int(value)

    def check_framing(self) -> None:
        """Limit the bytes outside the body. Raises RefusedRequestError."""
        if self.num_received - self._num_body > MAX_HEADER_BYTES + MAX_FRAMING * self._num_body:
            raise RefusedRequestError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
