"""Finds the checkpoint file that holds a tensor, and maps files into memory on request."""

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from tgis.errors import first_line
from tgis.shard.checkpoint.format import Format
from tgis.shard.checkpoint.progress import LoadProgress
from tgis.shard.checkpoint.tensors import FileTensor, MissingTensorError, WeightsError
from tgis.shard.memory.host_limits import release_memory
from tgis.tensor_files.errors import DAMAGED, INCOMPLETE, TensorFileError
from tgis.tensor_files.safe_pickle import can_map, is_plain, open_pickle

logger = logging.getLogger(__name__)

# For each file format: the name of a single file with all tensors, and the name of the index of several
# files.
SAFETENSORS = ("model.safetensors", "model.safetensors.index.json")
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
MODEL_FILES = (SAFETENSORS, PICKLES)
PICKLE_SUFFIXES = (".bin", ".pt")
# Files are reopened after this fraction of the checkpoint, within these limits, because pages that were read
# count as memory until then. Reopening a file takes about 20 ms.
REOPEN_FRACTION = 1 / 32
MIN_REOPEN_BYTES = 4 << 20
MAX_REOPEN_BYTES = 64 << 20


class _Safetensors:
    def __init__(self, file: Path):
        self._content: Any = safe_open(file, framework="pt")

    def keys(self) -> Iterable[str]:
        names: list[str] = self._content.keys()
        return names

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._content.get_tensor(name)
        return tensor


# Tensors of a file, by name. A tensor is read only when its elements are accessed.
TensorFile = Mapping[str, Tensor] | _Safetensors


class Checkpoint:
    """Tensors in `directory`, by name. Of `files`, those of the first format that is there are read. Raises
    WeightsError if the directory has no weights, or if files of them are missing."""

    has_scaled_matrices = False

    def __init__(self, directory: Path, files: Sequence[tuple[str, str]] = MODEL_FILES):
        self._directory = directory
        self._files = files
        self._open: dict[str, TensorFile] = {}
        self._heights: dict[str, int] = {}  # size of the first axis of each fetched tensor
        self._taken: dict[str, set[int]] = {}  # indices of the requested entries of each fetched tensor
        self._file_of = self._list_tensors()
        self._unclosed_bytes = 0
        paths = [directory / name for name in set(self._file_of.values())]
        num_bytes = sum(path.stat().st_size for path in paths)
        self._reopen_bytes = min(max(int(num_bytes * REOPEN_FRACTION), MIN_REOPEN_BYTES), MAX_REOPEN_BYTES)
        self.progress = LoadProgress(num_bytes)

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def list_names(self) -> Iterator[str]:
        return iter(self._file_of)

    def fetch(self, name: str) -> FileTensor:
        """Return a tensor of floats, without reading its elements. Raises WeightsError."""
        tensor = self.fetch_any(name)
        tensor.check_plain()
        return tensor

    def fetch_any(self, name: str) -> FileTensor:
        """Return a tensor of any type and shape, without reading its elements. Raises WeightsError."""
        if name not in self._file_of:
            raise MissingTensorError(f"{self._directory}: tensor {name} is missing")
        file = self._file_of[name]
        label = f"{self._directory / file}: tensor {name}"
        taken = self._taken.setdefault(name, set())
        tensor = FileTensor(partial(self._get_mapped, file, name, label), label, self._count, taken)
        self._heights[name] = tensor.shape[0] if tensor.shape else 1
        return tensor

    def count_elements(
        self, format: Format | None, is_counted: Callable[[str], bool] = lambda name: True
    ) -> int:
        """Count the elements of all matrices, or of those whose names are counted, from the file headers.
        Files without a header are ignored. Raises WeightsError."""
        names_in: dict[str, list[str]] = {}
        for name, file in filter(lambda entry: is_counted(entry[0]), self._file_of.items()):
            names_in.setdefault(file, []).append(name)
        total = 0
        for file, names in names_in.items():
            path = self._directory / file
            if _can_map(path):
                file_tensors = _open(path)
                tensors = (_get(file_tensors, name, f"{path}: tensor {name}") for name in names)
                total += sum(
                    _count_weights(name, tensor, format) for name, tensor in zip(names, tensors, strict=True)
                )
        return total

    def list_unread(self) -> Iterator[str]:
        """Yield the name of every tensor that was not fetched. For a tensor that was read entry by entry,
        yield the first missing entry, as `name[7]`."""
        for name in self._file_of:
            taken = self._taken.get(name)
            if taken is None:
                yield name
            elif taken and (left := set(range(self._heights[name])) - taken):
                yield f"{name}[{min(left)}]"

    def check_files(self) -> None:
        """Open each file once. Raises WeightsError for the first file that cannot be opened."""
        for file in sorted(set(self._file_of.values())):
            _open(self._directory / file)

    def close(self) -> None:
        """Close the files. Tensors that were read stay valid."""
        self._open.clear()

    def _get_mapped(self, file: str, name: str, label: str) -> Tensor:
        tensors = self._open.get(file)
        if tensors is None:  # not open yet, or closed again, perhaps by another thread
            tensors = self._open[file] = _open(self._directory / file)
        return _get(tensors, name, label)

    def _count(self, label: str, whole_bytes: int, read_bytes: int) -> None:
        self.progress.add(label, whole_bytes, read_bytes)
        self._unclosed_bytes += read_bytes
        if self._unclosed_bytes > self._reopen_bytes:
            self._unclosed_bytes = 0
            unmapped = [file for file in self._open if not _can_map(self._directory / file)]
            self._open = {file: self._open[file] for file in unmapped}
            release_memory()

    def _list_tensors(self) -> dict[str, str]:
        """Map each tensor's name to the name of its file."""
        for single, index in self._files:
            file = self._directory / single
            if file.is_file():
                self._open[single] = _open(file)
                return dict.fromkeys(self._open[single].keys(), single)
            if (self._directory / index).is_file():
                return _read_index(self._directory / index)
        known = " or ".join(name for names in self._files for name in names)
        raise WeightsError(
            f"{self._directory} has no weights: there is no {known}; download all files of the model"
        )


def has_headers(directory: Path) -> bool:
    """Return True if file headers give the shapes of all tensors. Raises WeightsError."""
    names = [name for name in (*SAFETENSORS, *PICKLES) if (directory / name).is_file()]
    return bool(names) and _can_map(directory / names[0])


def _count_weights(name: str, tensor: Tensor, format: Format | None) -> int:
    count = format.count_weights(name, tuple(tensor.shape)) if format else None
    return (tensor.numel() if tensor.dim() > 1 else 0) if count is None else count


def _open(file: Path) -> TensorFile:
    """Open a file of tensors. Raises WeightsError."""
    try:
        if file.suffix not in PICKLE_SUFFIXES:
            return _Safetensors(file)
        if not _can_map(file):
            logger.warning("%s has an old format: the whole file is loaded into memory to read it", file)
        tensors = open_pickle(file)
    except SafetensorError as error:
        raise WeightsError(f"{file} {DAMAGED}: {first_line(error)}") from error
    except TensorFileError as error:
        raise WeightsError(str(error)) from error
    except OSError as error:
        raise _unreadable(file, error) from error
    return {name: value.detach() for name, value in tensors.items() if is_plain(value)}


def _get(tensors: TensorFile, name: str, label: str) -> Tensor:
    """Return a tensor of an open file. Raises WeightsError."""
    try:
        return tensors[name]
    except (SafetensorError, KeyError, OSError) as error:
        if name in tensors.keys():  # noqa: SIM118
            raise WeightsError(f"{label} cannot be read: {first_line(error)}") from error
        raise WeightsError(f"{label} is in the index, but not in the file: {INCOMPLETE}") from error


def _can_map(file: Path) -> bool:
    """Return True if the file can be mapped into memory. Raises WeightsError."""
    try:
        return file.suffix not in PICKLE_SUFFIXES or can_map(file)
    except OSError as error:
        raise _unreadable(file, error) from error


def _unreadable(file: Path, error: OSError) -> WeightsError:
    return WeightsError(f"{file} cannot be read: {error.strerror or first_line(error)}")


def _read_index(index: Path) -> dict[str, str]:
    """Map each tensor name in an index to its file name. Raises WeightsError."""
    try:
        file_of = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        inside = all(Path(file).name == file for file in file_of.values())
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WeightsError(f"{index} {DAMAGED}: {first_line(error)}") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"{index} is not a weight index: {first_line(error)}") from error
    if not inside:
        raise WeightsError(f"{index} names a file outside its directory")
    for file in dict.fromkeys(file_of.values()):
        if not (index.parent / file).is_file():
            raise WeightsError(f"{index} names {file}, which does not exist: {INCOMPLETE}")
    return dict(file_of)
