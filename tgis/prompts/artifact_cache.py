"""Checked contents, kept under the digest of their bytes for all ranks to load: those of a request in
progress outlive the file that they were read from, and the process that read it."""

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

from tgis.prompts.errors import MissingContentError
from tgis.tensor_files.mapped_safetensors import map_tensors

Kind = Literal["prompt", "adapter"]

ABOUT = "tgis"  # the one key of a file's metadata: several would be written in any order
PIECE_BYTES = 1 << 20
MAX_WORK_S = 600.0  # from a look-up to a load; what is older waits for nobody
_DIGEST = re.compile("[0-9a-f]{64}")
_OS_ERROR = re.compile(r"\(os error (\d+)\)")  # how the library says that a disk is full
_UNFINISHED = ".unfinished-"


@dataclass(frozen=True)
class Kept:
    """`tensors` are mapped from the file; of a prompt "decoder" and "encoder", either of which may lack."""

    kind: Kind
    tensors: Mapping[str, Tensor]
    about: Mapping[str, Any]


class Spool:
    """A private directory. Safe to use from any thread and process."""

    def __init__(self, directory: Path) -> None:
        """It is made when it is first needed."""
        self._directory = directory

    @property
    def directory(self) -> Path:
        """It may not exist."""
        return self._directory

    def __contains__(self, digest: str) -> bool:
        return self._file(digest).is_file()

    def put(self, kind: Kind, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> str:
        """The digest. Equal contents have one file, whoever writes it; it appears whole or not at all.

        Raises OSError."""
        with self.room() as room:
            file = room / "content"
            _write(file, {"kind": kind, "about": about}, tensors)
            digest = _hash(file)
            os.replace(file, self._file(digest))
        return digest

    def open(self, digest: str) -> Kept:
        """What is not what it was is removed, and missing. Raises MissingContentError, and OSError."""
        if not _DIGEST.fullmatch(digest):
            raise MissingContentError(digest)
        file = self._file(digest)
        try:
            if _hash(file) == digest:
                return _read(file)
            file.unlink()
        except (FileNotFoundError, SafetensorError) as error:
            raise MissingContentError(digest) from error
        raise MissingContentError(digest)

    def read(self, digest: str) -> Iterator[bytes]:
        """A copy, piece by piece, for the spool of another machine. Raises MissingContentError, OSError."""
        if not _DIGEST.fullmatch(digest):
            raise MissingContentError(digest)
        try:
            file = self._file(digest).open("rb")
        except FileNotFoundError as error:
            raise MissingContentError(digest) from error
        return _pieces(file)

    def take(self, digest: str, pieces: Iterable[bytes]) -> None:
        """What `read` gave there; what is not, is missing. Raises MissingContentError, and OSError."""
        with self.room() as room:
            file = room / "content"
            with file.open("xb") as content:
                for piece in pieces:
                    content.write(piece)
            file.chmod(0o600)
            if _hash(file) != digest:
                raise MissingContentError(digest)
            os.replace(file, self._file(digest))

    def remove(self, digests: Iterable[str]) -> None:
        """Those that are there."""
        for digest in filter(_DIGEST.fullmatch, digests):
            self._file(digest).unlink(missing_ok=True)

    def remove_others(self, digests: Iterable[str]) -> None:
        """All but these."""
        self.remove(set(self._names()) - set(digests))
        self.sweep(digests)

    def sweep(self, kept: Iterable[str]) -> None:
        """Removes what nobody has come for: old copies other than `kept` ones, and what processes that died
        were at."""
        for name in set(self._names()) - set(kept):
            if name.startswith(_UNFINISHED) or _DIGEST.fullmatch(name):
                _remove_if_old(self._directory / name)

    @contextmanager
    def room(self) -> Iterator[Path]:
        """A directory to work in, gone at the end. Raises OSError."""
        self._make()
        with tempfile.TemporaryDirectory(
            prefix=_UNFINISHED, dir=self._directory, ignore_cleanup_errors=True
        ) as path:
            yield Path(path)

    def _names(self) -> list[str]:
        return [path.name for path in self._directory.iterdir()] if self._directory.is_dir() else []

    def _make(self) -> None:
        """Raises OSError, also where somebody else was there before."""
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = self._directory.lstat()
        if found.st_uid != os.geteuid() or not stat.S_ISDIR(found.st_mode):
            raise PermissionError(f"{self._directory} is not ours")
        if found.st_mode & 0o077:
            self._directory.chmod(0o700)

    def _file(self, digest: str) -> Path:
        return self._directory / digest


def _write(file: Path, about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    text = json.dumps(about, sort_keys=True, separators=(",", ":"))
    try:
        save_file(_separate(tensors), file, metadata={ABOUT: text})
        file.chmod(0o600)
    except SafetensorError as error:
        found = _OS_ERROR.search(str(error))
        if found is None:
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1])), str(file)) from error


def _separate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """As a file can hold them: contiguous, and no two of them in the same memory."""
    separate, end = {}, 0
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].data_ptr()):
        own = tensor.detach().contiguous()
        own = own.clone() if own.data_ptr() < end else own
        separate[name], end = own, max(end, own.data_ptr() + own.nbytes)
    return separate


def _pieces(file: BinaryIO) -> Iterator[bytes]:
    with file:
        while piece := file.read(PIECE_BYTES):
            yield piece


def _hash(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _read(file: Path) -> Kept:
    tensors, metadata = map_tensors(file)
    about = json.loads(metadata[ABOUT])
    return Kept(about["kind"], tensors, about["about"])


def _remove_if_old(path: Path) -> None:
    try:
        age_s = time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return
    if age_s > MAX_WORK_S and path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    elif age_s > MAX_WORK_S:
        path.unlink(missing_ok=True)
