"""Keeps copies of checked soft prompts and adapters, by digest, for all ranks to load.

A copy used by a request survives changes of the original files and the end of the process that read them."""

import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from tgis.prompts.errors import MissingArtifactError
from tgis.tensor_files.mapped_safetensors import map_tensors, separate_memory

Kind = Literal["prompt", "adapter"]

ABOUT = "tgis"  # the only key of a file's metadata, because the order of several keys is not defined
PIECE_BYTES = 1 << 20
MAX_WORK_S = 600.0  # between the lookup of a copy and its loading; older unused copies are removed
_DIGEST = re.compile("[0-9a-f]{64}")
_OS_ERROR = re.compile(r"\(os error (\d+)\)")  # in safetensors' errors, for example for a full disk
_UNFINISHED = ".unfinished-"


@dataclass(frozen=True)
class Artifact:
    """Copy of an adapter, or of a soft prompt with "decoder", "encoder" or both. `tensors` are
    memory-mapped."""

    kind: Kind
    tensors: Mapping[str, Tensor]
    about: Mapping[str, Any]


class ArtifactCache:
    """Private directory of copies, created on first use. It is safe to use from any thread and process."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def __contains__(self, digest: str) -> bool:
        return self._file(digest).is_file()

    def put(self, kind: Kind, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> str:
        """Write a copy atomically and return its digest. Equal contents share one file. Raises OSError."""
        with self.temporary_directory() as directory:
            file = directory / "content"
            _write(file, {"kind": kind, "about": about}, tensors)
            digest = _hash(file)
            os.replace(file, self._file(digest))
        return digest

    def open(self, digest: str) -> Artifact:
        """Return the copy. Raises MissingArtifactError, also for a damaged copy, which it removes, and
        OSError."""
        file = self._file(digest)
        try:
            if _hash(file) == digest:
                return _read(file)
            file.unlink()
        except (FileNotFoundError, SafetensorError) as error:
            raise MissingArtifactError(digest) from error
        raise MissingArtifactError(digest)

    def read_pieces(self, digest: str) -> Iterator[bytes]:
        """Return a copy's bytes, for another machine's cache. Raises MissingArtifactError and OSError."""
        try:
            file = self._file(digest).open("rb")
        except FileNotFoundError as error:
            raise MissingArtifactError(digest) from error
        return _pieces(file)

    def write_pieces(self, digest: str, pieces: Iterable[bytes]) -> None:
        """Write a copy from `read_pieces`. Raises MissingArtifactError for another digest, and OSError."""
        with self.temporary_directory() as directory:
            file = directory / "content"
            with file.open("xb") as content:
                for piece in pieces:
                    content.write(piece)
            file.chmod(0o600)
            if _hash(file) != digest:
                raise MissingArtifactError(digest)
            os.replace(file, self._file(digest))

    def remove(self, digests: Iterable[str]) -> None:
        """Remove the copies with these digests. Missing ones are ignored."""
        for digest in filter(_DIGEST.fullmatch, digests):
            self._file(digest).unlink(missing_ok=True)

    def remove_others(self, digests: Iterable[str]) -> None:
        self.remove(set(self._names()) - set(digests))
        self.sweep(digests)

    def sweep(self, kept: Iterable[str]) -> None:
        """Remove old copies that are not in `kept`, and unfinished files of processes that died."""
        for name in set(self._names()) - set(kept):
            if name.startswith(_UNFINISHED) or _DIGEST.fullmatch(name):
                _remove_if_old(self.directory / name)

    @contextmanager
    def temporary_directory(self) -> Iterator[Path]:
        """Yield a temporary directory, which is removed at the end. Raises OSError."""
        self._make()
        with tempfile.TemporaryDirectory(
            prefix=_UNFINISHED, dir=self.directory, ignore_cleanup_errors=True
        ) as path:
            yield Path(path)

    def _names(self) -> list[str]:
        return [path.name for path in self.directory.iterdir()] if self.directory.is_dir() else []

    def _make(self) -> None:
        """Create the directory and make it private. Raises OSError, also if it belongs to another user."""
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = self.directory.lstat()
        if status.st_uid != os.geteuid() or not stat.S_ISDIR(status.st_mode):
            raise PermissionError(f"{self.directory} belongs to another user or is not a directory")
        if status.st_mode & 0o077:
            self.directory.chmod(0o700)

    def _file(self, digest: str) -> Path:
        """Return the path of a copy, which may not exist. Raises MissingArtifactError for an invalid
        digest."""
        if not _DIGEST.fullmatch(digest):
            raise MissingArtifactError(digest)
        return self.directory / digest


def _write(file: Path, about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    text = json.dumps(about, sort_keys=True, separators=(",", ":"))
    try:
        save_file(separate_memory(tensors), file, metadata={ABOUT: text})
        file.chmod(0o600)
    except SafetensorError as error:
        match = _OS_ERROR.search(str(error))
        if match is None:
            raise
        raise OSError(int(match[1]), os.strerror(int(match[1])), str(file)) from error


def _pieces(file: BinaryIO) -> Iterator[bytes]:
    with file:
        while piece := file.read(PIECE_BYTES):
            yield piece


def _hash(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _read(file: Path) -> Artifact:
    tensors, metadata = map_tensors(file)
    about = json.loads(metadata[ABOUT])
    return Artifact(about["kind"], tensors, about["about"])


def _remove_if_old(path: Path) -> None:
    try:
        age_s = time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return
    if age_s > MAX_WORK_S and path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    elif age_s > MAX_WORK_S:
        path.unlink(missing_ok=True)
