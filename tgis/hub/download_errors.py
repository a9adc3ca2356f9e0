"""What a hub, the network or the disk can do to a download, each in one line without addresses or tokens."""

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
    """A model cannot be downloaded; the text says why in one line."""


@contextmanager
def told_in_one_line(name: str, revision: str, file: str | None = None) -> Iterator[None]:
    """Raises DownloadError for whatever the library raises about a model, or about one file of it."""
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
    """The system's words, from below the libraries' own."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, OSError) and found.strerror:
            return found.strerror
        found = found.__cause__ or found.__context__
    return type(error).__name__
