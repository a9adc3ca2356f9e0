"""Shortens the log of answers that no longer reach their clients.
grpc.aio sends a unary answer itself, and logs a traceback if the client has reset the call meanwhile. Clients
reset a call when its answer exceeds their size limit, so any client could cause these tracebacks."""

import logging

import grpc

from tgis.log_limits import KIND
from tgis.router.api.grpc.grpc_internals import LOGGER

TEXT = "an answer could not be sent: its client has left, or does not take messages of its size"


def shorten_send_errors() -> None:
    """Replace the library's traceback by one line from now on."""
    logging.getLogger(LOGGER).addFilter(_shorten)


def _shorten(record: logging.LogRecord) -> bool:
    if isinstance(record.exc_info, tuple) and isinstance(record.exc_info[1], grpc.aio.InternalError):
        record.levelno = logging.WARNING
        record.levelname = "WARNING"
        record.msg = TEXT
        record.args = ()
        record.exc_info = None
        setattr(record, KIND, "gRPC answer not sent")
    return True
