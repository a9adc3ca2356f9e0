"""HTTP statuses of errors, which answers and spans of all APIs over HTTP share."""

from tgis.router.errors import Code, NotFoundError, PayloadTooLargeError, RouterError

STATUS = {
    Code.INVALID_ARGUMENT: 400,
    Code.RESOURCE_EXHAUSTED: 429,
    Code.UNAVAILABLE: 503,
    Code.INTERNAL: 500,
}


def http_status(error: Exception) -> int:
    """Return the status of an answer that has not begun. An unforeseen error is the service's fault."""
    if isinstance(error, NotFoundError):
        return 404
    if isinstance(error, PayloadTooLargeError):
        return 413
    return STATUS[error.code if isinstance(error, RouterError) else Code.INTERNAL]
