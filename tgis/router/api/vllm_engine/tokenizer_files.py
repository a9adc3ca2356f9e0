"""Packs the files of the tokenizer, so that a gateway can tokenize as this service does."""

import asyncio
import hashlib
import io
import zipfile
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from smg_grpc_proto.generated import common_pb2

NAMES = (
    "chat_template.jinja",
    "chat_template.json",
    "config.json",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
)
CHUNK_BYTES = 64 << 10
_EPOCH = (1980, 1, 1, 0, 0, 0)  # replicas with equal files must send equal bytes


class Archive(NamedTuple):
    data: bytes
    sha256: str


class TokenizerFiles:
    """Archive of the tokenizer's files, made once."""

    def __init__(self, directories: tuple[Path, ...], replacements: Mapping[str, Path]) -> None:
        """Take the directories that may have the files; earlier ones have precedence. `replacements` are the
        operator's own files by the names of the files that they replace."""
        self._directories, self._replacements = directories, replacements
        self._turn = asyncio.Lock()

    async def read(self) -> Archive:
        async with self._turn:
            return await asyncio.to_thread(lambda: self._archive)

    @cached_property
    def _archive(self) -> Archive:
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in self._read_files():
                archive.writestr(zipfile.ZipInfo(name, _EPOCH), content, zipfile.ZIP_DEFLATED)
        data = buffer.getvalue()
        return Archive(data, hashlib.sha256(data).hexdigest())

    def _read_files(self) -> Iterator[tuple[str, bytes]]:
        for name in NAMES:
            own = [self._replacements[name]] if name in self._replacements else []
            paths = own + [directory / name for directory in self._directories]
            if (path := next((path for path in paths if path.is_file()), None)) is not None:
                yield name, path.read_bytes()


def split(archive: Archive) -> Iterator[common_pb2.GetTokenizerChunk]:
    """Yield the archive in chunks. The last one has the digest of all bytes."""
    for start in range(0, len(archive.data), CHUNK_BYTES):
        end = start + CHUNK_BYTES
        is_last = end >= len(archive.data)
        yield common_pb2.GetTokenizerChunk(
            data=archive.data[start:end], sha256=archive.sha256 if is_last else ""
        )
