"""Opens the checkpoint in a directory: safetensors, pickle or GGUF files."""

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from tgis.hub.gguf_files import SUFFIX
from tgis.shard.checkpoint.files import PICKLES, SAFETENSORS, Checkpoint, has_headers
from tgis.shard.checkpoint.format import Format, Tensors
from tgis.shard.checkpoint.gguf.checkpoint import GgufCheckpoint
from tgis.shard.checkpoint.progress import LoadProgress
from tgis.shard.checkpoint.tensors import StoredTensor


class OpenCheckpoint(Tensors, Protocol):
    """Tensors by name. A tensor is read only when its elements are requested."""

    progress: LoadProgress
    has_scaled_matrices: bool
    """True if matrices were multiplied by constant factors of the model, which are not known any more."""

    def list_names(self) -> Iterator[str]: ...

    def fetch(self, name: str) -> StoredTensor:
        """Return a tensor of floats, without reading its elements. Raises WeightsError."""

    def list_unread(self) -> Iterator[str]:
        """Yield the name of every tensor that was not fetched. For a tensor that was read entry by entry,
        yield the first missing entry, as `name[7]`."""

    def count_elements(self, format: Format | None) -> int:
        """Count the elements of all matrices from the file headers. Raises WeightsError."""

    def close(self) -> None:
        """Close the files. Tensors that were read stay valid."""


def open_checkpoint(directory: Path) -> OpenCheckpoint:
    """Open a checkpoint. Safetensors files are preferred to pickles, and both to GGUF files. Raises
    WeightsError if the directory has no weights, or if files of them are missing."""
    return GgufCheckpoint(list_gguf(directory)) if is_gguf(directory) else Checkpoint(directory)


def is_gguf(directory: Path) -> bool:
    """Return True if the only weights in a directory are GGUF files."""
    has_others = any((directory / name).is_file() for name in (*SAFETENSORS, *PICKLES))
    return not has_others and bool(list_gguf(directory))


def list_gguf(directory: Path) -> list[Path]:
    """Return the GGUF files of a directory. Links are resolved, so that messages name the operator's
    files."""
    files = sorted(directory.glob(f"*{SUFFIX}"))
    return [directory / file.readlink() if file.is_symlink() else file for file in files]


def count_elements(directory: Path, format: Format | None = None) -> int:
    """Count the elements of all matrices of a checkpoint without reading them. Return 0 if that is
    impossible. Raises WeightsError if files are damaged."""
    can_count = is_gguf(directory) or has_headers(directory)
    return open_checkpoint(directory).count_elements(format) if can_count else 0
