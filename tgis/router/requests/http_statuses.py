"""Maps errors to HTTP statuses, for answers and spans."""

from tgis.router.errors import Code, RouterError, TimedOutError
from tgis.router.requests.api_rules import ApiRules, ErrorKind


def is_late(error: Exception) -> bool:
    """Return True if a text timed out after its first token."""
    return isinstance(error, TimedOutError) and not error.is_first


def http_status(error: Exception, api: ApiRules) -> int:
    """Return the status of an error that occurs before the answer begins. Unforeseen errors count as
    internal."""
    own = next((status for kind, status in api.statuses.items() if _is_kind(error, kind)), None)
    if own is not None:
        return own
    return api.statuses[error.code if isinstance(error, RouterError) else Code.INTERNAL]


def _is_kind(error: Exception, kind: ErrorKind) -> bool:
    if isinstance(kind, Code):
        return False
    return isinstance(error, kind) if isinstance(kind, type) else kind(error)
