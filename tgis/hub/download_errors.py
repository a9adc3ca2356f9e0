"""Describes a failed download, caused by hub, network or disk, in one line without URLs or tokens."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from huggingface_hub import constants
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from tgis.errors import OperatorError

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class DownloadError(OperatorError):
    """Error when a model cannot be downloaded; the text is one line with the reason."""


@contextmanager
def told_in_one_line(name: str, revision: str, file: str | None = None) -> Iterator[None]:
    """Convert the library's errors about a model, or about one file of it, to DownloadError."""
    try:
        yield
    except (HTTPError, OSError, HFValidationError) as error:
        raise DownloadError(_describe(error, name, revision, file)) from error


def _describe(error: Exception, name: str, revision: str, file: str | None) -> str:
    what = f"{name}: {file}" if file else name
    match error:
        case OfflineModeIsEnabled():
            return f"{what} cannot be downloaded: HF_HUB_OFFLINE is set"
        case GatedRepoError():
            return f"{what}: access is gated; ask for it on the hub, and give a token by --token or HF_TOKEN"
        case RevisionNotFoundError():
            return f"{name} has no revision {revision} on the hub"
        case RepositoryNotFoundError():
            return f"{name} is not on the hub, or is private and needs a token by --token or HF_TOKEN"
        case HFValidationError():
            return f"{name} is neither a directory nor the id of a model on the hub"
        case HfHubHTTPError():
            return _describe_status(error.response.status_code, what)
        case LocalEntryNotFoundError() | HTTPError():
            host = urlsplit(constants.ENDPOINT).hostname
            return f"{what}: the hub at {host} cannot be reached: {_cause(error)}"
    assert isinstance(error, OSError)
    if error.errno in NO_SPACE:
        return f"{what}: no space left in the hub cache"
    return f"{what} cannot be written: {error.strerror or type(error).__name__}"


def _describe_status(status: int, what: str) -> str:
    if status in (401, 403):
        return f"{what}: the hub refuses access (HTTP {status}); is the token right?"
    return f"{what}: the hub answers with HTTP {status}"


def _cause(error: BaseException) -> str:
    """Return the operating system's error text from the chain of causes, else the error's type."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, OSError) and found.strerror:
            return found.strerror
        found = found.__cause__ or found.__context__
    return type(error).__name__
