"""Memory-maps the tensors of safetensors files in a process that loads and drops many files.

The library's own method (version 0.8) leaks memory for each tensor."""

import json
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tgis.tensor_files.errors import DAMAGED, TensorFileError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def map_tensors(file: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors by name and the metadata. Tensors are copy-on-write views: the file must not change.

    Raises the library's errors for damaged files, KeyError or RuntimeError if the library does not detect the
    damage, and OSError."""
    with safe_open(file, framework="numpy"):  # checks the header
        pass
    with file.open("rb") as content:
        mapped = mmap.mmap(content.fileno(), 0, access=mmap.ACCESS_COPY)
    start = 8 + int.from_bytes(mapped[:8], "little")
    header = json.loads(mapped[8:start])
    metadata = header.pop("__metadata__", {})
    stored = torch.frombuffer(mapped, dtype=torch.uint8)[start:]
    return {name: _view(stored, start, entry) for name, entry in header.items()}, metadata


def map_untrusted(file: Path, max_header_bytes: int) -> dict[str, Tensor]:
    """Return the tensors by name, like `map_tensors`. Raises TensorFileError, OSError."""
    with file.open("rb") as content:
        if int.from_bytes(content.read(8), "little") > max_header_bytes:
            raise TensorFileError(f"{file} has a header that is too large")
    try:
        return map_tensors(file)[0]
    # For a damaged header, the library may raise any of these errors.
    except (SafetensorError, ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
        raise TensorFileError(f"{file} {DAMAGED}") from error


def separate_memory(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return contiguous tensors that share no memory, as the file format requires."""
    separate = {}
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].data_ptr()):
        own = tensor.detach().contiguous()
        own = own.clone() if own.data_ptr() < end else own
        separate[name] = own
        end = max(end, own.data_ptr() + own.nbytes)
    return separate


def _view(stored: Tensor, start: int, entry: Mapping[str, Any]) -> Tensor:
    dtype = DTYPES[entry["dtype"]]
    first, end = entry["data_offsets"]
    elements = stored[first:end]
    if (start + first) % dtype.itemsize:
        elements = elements.clone()
    return elements.view(dtype).view(entry["shape"])
