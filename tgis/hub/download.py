"""Downloads a model's files from a hub to the hub cache with huggingface_hub.

Interrupted downloads resume, and a file enters the cache only if its size and checksum are correct."""

# The library's snapshot_download (2.4) is no replacement: it removes the part of an interrupted download,
# compares sizes but no checksums, keeps a blob that was cut short, and only warns of a full disk.

import errno
import hashlib
import io
import logging
import re
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

from huggingface_hub import HfApi, constants, get_hf_file_metadata, hf_hub_download, hf_hub_url
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
from huggingface_hub.file_download import http_get
from huggingface_hub.utils import WeakFileLock, build_hf_headers
from huggingface_hub.utils.logging import set_verbosity_error

from tgis.errors import OperatorError
from tgis.hub.cache import cache_entry
from tgis.hub.download_progress import logged_progress

logger = logging.getLogger(__name__)

META_EXTENSIONS = (".json", ".py", ".model", ".md", ".jinja")
NOT_FETCHED = ("arguments", "args", "training")
NAME_ON_DISK = re.compile(r"\w[\w.+=-]*")  # allowed format of names from the hub that become parts of paths
TOKENIZER_NAMES = re.compile(r"vocab\.txt|merges\.txt|.*\.tiktoken")
NUM_THREADS = 5
TIMEOUT_S = 30.0
DELAYS_S = (1.0, 2.0, 4.0, 8.0)  # before the next attempts; received bytes restart the sequence
TRANSIENT = (408, 429, 500, 502, 503, 504)
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

T = TypeVar("T")
R = TypeVar("R")


class DownloadError(OperatorError):
    """Error for a model that cannot be downloaded; its text is one line, without URLs or tokens."""


class _StopDownload(Exception):
    """Raised to end a download after another file's download has failed."""


@dataclass(frozen=True)
class RemoteFile:
    """File of one commit, as the hub describes it, and its path in the cache."""

    name: str
    blob: Path
    etag: str
    """SHA-256 or git's SHA-1 of the file; hubs other than Hugging Face's may send any text."""
    size: int | None
    """Size in bytes; None if the hub does not send it."""
    is_xet: bool

    @property
    def part(self) -> Path:
        """File of the bytes received so far; the next download resumes it."""
        return self.blob.with_name(f"{self.etag}.incomplete")

    @property
    def is_whole(self) -> bool:
        return self.blob.is_file() and self.size in (None, _size(self.blob))

    @property
    def num_received(self) -> int:
        return _size(self.blob) or _size(self.part)

    def has_checksum(self, path: Path) -> bool:
        """Return True if `path` has the ETag's checksum, or if the ETag is not a checksum."""
        if re.fullmatch("[0-9a-f]{64}", self.etag):
            digest = hashlib.sha256()
        elif re.fullmatch("[0-9a-f]{40}", self.etag):
            digest = hashlib.sha1(b"blob %d\0" % _size(path), usedforsecurity=False)
        else:
            return True
        with path.open("rb") as content:
            return bool(hashlib.file_digest(content, lambda: digest).hexdigest() == self.etag)


def choose_extensions(text: str) -> tuple[str, ...]:
    """Parse a list of extensions; add META_EXTENSIONS if there is only one and it is not among them."""
    given = tuple(part.strip() for part in text.split(","))
    return given if len(given) > 1 or given[0] in META_EXTENSIONS else (*given, *META_EXTENSIONS)


class Repository:
    """Commit of a model on the hub, and the directory of its files in the cache."""

    def __init__(self, name: str, revision: str | None, token: str | None, cache: Path) -> None:
        """Request the commit and its files from the hub. Raises DownloadError."""
        _silence_libraries()
        address = urlsplit(constants.ENDPOINT)
        if address.scheme not in ("http", "https") or not address.hostname:
            raise DownloadError("HF_ENDPOINT is not the URL of a hub: it must begin with http:// or https://")
        self.name = name.rstrip("/")
        self._token = token
        self._cache = cache
        self._revision = revision or "main"
        self._stop = threading.Event()
        with self._errors_in_one_line():
            api = HfApi(token=token)
            info = self._retry(lambda: api.model_info(self.name, revision=self._revision, timeout=TIMEOUT_S))
        self.commit = str(info.sha)
        if not NAME_ON_DISK.fullmatch(self.commit):
            raise DownloadError(f"{self.name}: the hub returned no valid commit")
        self._files = [file.rfilename for file in info.siblings or [] if "/" not in file.rfilename]
        self._entry = cache_entry(self.name, cache)
        self.directory = self._entry / "snapshots" / self.commit

    def select(self, extensions: Sequence[str]) -> list[str]:
        """Return the names of the files with these extensions, except those that are never downloaded."""
        named = [name for name in self._files if name.endswith(tuple(extensions))]
        return [name for name in named if not any(word in name for word in NOT_FETCHED)]

    def select_tokenizer(self) -> list[str]:
        """Return the tokenizer files to convert, besides META_EXTENSIONS, if there is no tokenizer.json."""
        has_fast = "tokenizer.json" in self._files
        return [name for name in self._files if not has_fast and TOKENIZER_NAMES.fullmatch(name)]

    def download(self, names: Iterable[str]) -> None:
        """Download the files in threads, then point the revision at this commit. Raises DownloadError."""
        with self._errors_in_one_line():
            files = self._in_threads(self._describe, list(names))
            self._check_space(files)
            num_bytes = sum(file.size or 0 for file in files)
            with logged_progress(self.name, num_bytes, lambda: sum(file.num_received for file in files)):
                self._in_threads(self._fetch, files)
            self._write_reference()

    def _describe(self, name: str) -> RemoteFile:
        with self._errors_in_one_line(name):
            metadata = self._retry(
                lambda: get_hf_file_metadata(self._url(name), token=self._token, timeout=TIMEOUT_S)
            )
            if not NAME_ON_DISK.fullmatch(metadata.etag or ""):
                raise DownloadError(f"{name}: the hub returned no valid ETag")
            blob = self._entry / "blobs" / metadata.etag
            return RemoteFile(name, blob, metadata.etag, metadata.size, metadata.xet_file_data is not None)

    def _check_space(self, files: Iterable[RemoteFile]) -> None:
        self._cache.mkdir(parents=True, exist_ok=True)
        missing = [file for file in files if not file.is_whole]
        needed = sum(max((file.size or 0) - _size(file.part), 0) for file in missing)
        free = shutil.disk_usage(self._cache).free
        if needed > free:
            raise DownloadError(
                f"{self.name} needs {needed / 1e6:,.1f} MB more, but {self._cache} has {free / 1e6:,.1f} MB"
            )

    def _fetch(self, file: RemoteFile) -> None:
        """Download the blob and link it into the snapshot. A failed download keeps its part to resume."""
        with self._errors_in_one_line(file.name):
            link = self.directory / file.name
            if link.is_file() and not link.is_symlink():  # a cache that cannot hold links has no blobs
                return
            if not file.is_whole and not (file.is_xet and self._fetch_by_xet(file)):
                file.blob.parent.mkdir(parents=True, exist_ok=True)
                lock = self._cache / ".locks" / self._entry.name / f"{file.etag}.lock"
                lock.parent.mkdir(parents=True, exist_ok=True)
                with WeakFileLock(lock):
                    if not file.is_whole:  # another process may have downloaded it in the meantime
                        self._fetch_by_http(file)
            self._link(file)

    def _fetch_by_http(self, file: RemoteFile) -> None:
        if file.size is None or _size(file.part) > file.size:
            file.part.unlink(missing_ok=True)
        self._retry(lambda: self._receive(file), lambda: _size(file.part))
        received = _size(file.part)
        if file.size not in (None, received) or not file.has_checksum(file.part):
            fault = f"{received} of {file.size} bytes" if file.size != received else "a wrong checksum"
            file.part.unlink()
            raise DownloadError(f"{file.name} arrived with {fault} and was removed; run the command again")
        file.part.replace(file.blob)

    def _receive(self, file: RemoteFile) -> None:
        """Append the missing bytes to the file's part.

        They come from the hub's own URL, which does not expire like signed URLs. The library sends the token
        only to the hub."""
        headers = {**build_hf_headers(token=self._token), "Accept-Encoding": "identity"}
        with _PartialFile(file.part, self._stop) as content:
            begun = content.seek(0, io.SEEK_END)
            if begun != file.size:
                http_get(
                    self._url(file.name),
                    content,
                    resume_size=begun,
                    headers=headers,
                    displayed_filename=file.name,
                )

    def _fetch_by_xet(self, file: RemoteFile) -> bool:
        """Return True if xet, a faster protocol that some mirrors lack, downloaded the file intact."""
        if constants.HF_HUB_DISABLE_XET or find_spec("hf_xet") is None:
            return False
        try:
            self._link(file)
        except Exception as error:  # xet raises many types, some of them from a Rust library
            logger.warning("%s: xet failed (%s), continuing over HTTP", file.name, type(error).__name__)
            return False
        if file.is_whole and file.has_checksum(file.blob):
            return True
        logger.warning("%s: the file downloaded by xet is damaged, continuing over HTTP", file.name)
        file.blob.unlink()
        return False

    def _link(self, file: RemoteFile) -> None:
        """Link the blob into the snapshot. The library downloads the blob first if it is missing."""
        hf_hub_download(
            self.name, file.name, revision=self.commit, cache_dir=str(self._cache), token=self._token
        )

    def _write_reference(self) -> None:
        if self._revision == self.commit:
            return
        reference = self._entry / "refs" / self._revision
        reference.parent.mkdir(parents=True, exist_ok=True)
        fresh = reference.with_name(f".{reference.name}.{threading.get_native_id()}")
        fresh.write_text(self.commit)
        fresh.replace(reference)

    def _retry(self, action: Callable[[], R], progress: Callable[[], int] = lambda: 0) -> R:
        """Run `action` and retry transient failures, up to len(DELAYS_S) times in a row without
        `progress`."""
        failures = 0
        reached = progress()
        while True:
            try:
                return action()
            except HTTPError as error:
                failures = failures + 1 if progress() == reached else 1
                reached = progress()
                status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
                if failures > len(DELAYS_S) or status not in (None, *TRANSIENT):
                    raise
                reason = status or type(error).__name__
                logger.info("%s: the hub failed (%s), retrying", self.name, reason)
            if self._stop.wait(DELAYS_S[failures - 1]):
                raise _StopDownload

    def _in_threads(self, action: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """Run `action` on all items in threads and return the results in order. The first failure stops
        all."""
        with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="download") as pool:
            futures = [pool.submit(action, item) for item in items]
            try:
                for future in as_completed(futures):
                    future.result()
            except BaseException:
                self._stop.set()
                pool.shutdown(cancel_futures=True)
                raise
            return [future.result() for future in futures]

    @contextmanager
    def _errors_in_one_line(self, file: str | None = None) -> Iterator[None]:
        """Convert the library's errors about the model, or about one file of it, to DownloadError."""
        try:
            yield
        except (HTTPError, OSError, HFValidationError) as error:
            raise DownloadError(_explain(error, self.name, self._revision, file)) from error

    def _url(self, name: str) -> str:
        return str(hf_hub_url(self.name, name, revision=self.commit))


class _PartialFile(io.BufferedWriter):
    """Writer that appends to a partial file and raises _StopDownload once `stop` is set."""

    def __init__(self, path: Path, stop: threading.Event) -> None:
        super().__init__(io.FileIO(path, "ab"))
        self._stop = stop

    def write(self, chunk: io.BufferedIOBase, /) -> int:  # type: ignore[override]
        if self._stop.is_set():
            raise _StopDownload
        return super().write(chunk)  # type: ignore[arg-type]


def _silence_libraries() -> None:
    """Raise the libraries' log levels, because they log URLs, which may be signed."""
    set_verbosity_error()
    for name in ("httpx", "httpx2"):
        logging.getLogger(name).setLevel(logging.WARNING)


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _explain(error: Exception, name: str, revision: str, file: str | None) -> str:
    what = f"{name}: {file}" if file else name
    match error:
        case OfflineModeIsEnabled():
            return f"{what} cannot be downloaded: HF_HUB_OFFLINE is set"
        case GatedRepoError():
            return f"{what}: access is gated; request it on the hub, and set a token with --token or HF_TOKEN"
        case RevisionNotFoundError():
            return f"{name} has no revision {revision} on the hub"
        case RepositoryNotFoundError():
            return f"{name} is not on the hub, or is private and needs a token in --token or HF_TOKEN"
        case HFValidationError():
            return f"{name} is neither a directory nor the id of a model on the hub"
        case HfHubHTTPError():
            return _explain_status(error.response.status_code, what)
        case LocalEntryNotFoundError() | HTTPError():
            host = urlsplit(constants.ENDPOINT).hostname
            return f"{what}: the hub at {host} cannot be reached: {_cause(error)}"
    assert isinstance(error, OSError)
    if error.errno in NO_SPACE:
        return f"{what}: no space left in the hub cache"
    return f"{what} cannot be written: {error.strerror or type(error).__name__}"


def _explain_status(status: int, what: str) -> str:
    if status in (401, 403):
        return f"{what}: the hub refuses access (HTTP {status}); check the token"
    return f"{what}: the hub returns HTTP {status}"


def _cause(error: BaseException) -> str:
    """Return the operating system's error text from the chain of causes, else the error's type."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    return type(error).__name__
