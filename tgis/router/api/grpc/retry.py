"""Tells clients of an overloaded server when to retry, in the two ways that clients read:
`google.rpc.RetryInfo` and gRPC's own pushback."""

from google.protobuf.any_pb2 import Any
from google.protobuf.duration_pb2 import Duration

RETRY_S = 1
RETRY_INFO = "type.googleapis.com/google.rpc.RetryInfo"

Metadata = tuple[tuple[str, str | bytes], ...]


def retry_later(code: int, text: str) -> Metadata:
    """Return the trailing metadata for a status of `code` and `text`."""
    retry_info = _field(1, Duration(seconds=RETRY_S).SerializeToString())
    detail = Any(type_url=RETRY_INFO, value=retry_info).SerializeToString()
    # The field numbers of google.rpc.Status are part of a public contract.
    status = bytes([1 << 3, code]) + _field(2, text.encode()) + _field(3, detail)
    return ("grpc-status-details-bin", status), ("grpc-retry-pushback-ms", str(1000 * RETRY_S))


def _field(number: int, data: bytes) -> bytes:
    assert len(data) < 128, "one byte says how long it is"
    return bytes([number << 3 | 2, len(data)]) + data
