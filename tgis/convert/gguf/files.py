"""Reads the headers of a GGUF model, which is one file or a split set of files."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tgis.convert.atomic_write import ConversionError
from tgis.convert.gguf.metadata import Metadata
from tgis.errors import first_line
from tgis.tensor_files.errors import TensorFileError
from tgis.tensor_files.gguf_header import GgufHeader, GgufTensorPlace, read_gguf_header


@dataclass(frozen=True)
class FileTensorPlace:
    """Position of a tensor, with the file that contains it."""

    path: Path
    place: GgufTensorPlace


@dataclass(frozen=True)
class GgufFiles:
    """Metadata of the first file, and the tensors of all files."""

    paths: tuple[Path, ...]
    metadata: Metadata
    tensors: Mapping[str, FileTensorPlace]

    def __contains__(self, name: str) -> bool:
        return name in self.tensors


def open_gguf(paths: Sequence[Path]) -> GgufFiles:
    """Read the headers of a model's files, in the order of the set. Raises ConversionError."""
    headers = [_read_header(path) for path in paths]
    metadata = Metadata(headers[0].path, headers[0].metadata)
    count = metadata.integer("split.count", 1)
    if count > 1 and count != len(headers):
        raise metadata.refuse("split.count", f"is {count}, but there are {len(headers)} files")
    tensors: dict[str, FileTensorPlace] = {}
    for header in headers:
        for name, place in header.tensors.items():
            if name in tensors:
                raise ConversionError(f"{header.path}: tensor {name} is also in {tensors[name].path.name}")
            tensors[name] = FileTensorPlace(header.path, place)
    return GgufFiles(tuple(paths), metadata, tensors)


def _read_header(path: Path) -> GgufHeader:
    try:
        return read_gguf_header(path)
    except TensorFileError as error:
        raise ConversionError(str(error)) from error
    except (OSError, ValueError) as error:  # an empty file cannot be memory-mapped
        raise ConversionError(f"{path} cannot be read: {first_line(error)}") from error
