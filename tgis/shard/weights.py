"""Reads a checkpoint of safetensors files, and of every tensor only the slice that is asked for.

A family's table says where each of our modules finds its tensors; `stack` packs several of them into one."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tgis.errors import OperatorError

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_READABLE = ("F32", "F16", "BF16")
_ALL = slice(None)


class WeightsError(OperatorError):
    """The checkpoint cannot be used; the text is one line that names the file and, if any, the tensor."""


class Stored(Protocol):
    """A tensor of which parts can be read."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def label(self) -> str:
        """File and name, for messages."""

    def read(self, rows: slice = _ALL, columns: slice = _ALL) -> Tensor:
        """The part as stored: float32, float16 or bfloat16; vectors have rows only. It may be the file's own
        memory, so what is kept must be copied. Raises WeightsError."""


Fetch = Callable[[str], Stored]  # the checkpoint's name, without layer number and ".weight" -> the tensor
Source = str | Callable[[Fetch], Stored]


def stack(*names: str) -> Source:
    """Separate tensors, packed row-wise in this order."""
    return lambda fetch: _Stack([fetch(name) for name in names])


class Weights:
    """The tensors of a checkpoint under the names of our modules.

    `sources` is keyed by module path, with the layer's number as `{i}`. Raises WeightsError where the
    directory holds no safetensors weights."""

    def __init__(self, directory: Path, sources: Mapping[str, Source]):
        self._directory, self._sources = directory, sources
        self._file_of = _read_index(directory)
        self._open: dict[str, Any] = {}

    def find(self, path: str, shape: tuple[int, ...]) -> Stored:
        """The tensor of a module, `find("blocks.3.mlp.up.weight", (rows, columns))`. Raises WeightsError."""
        module, _, end = path.rpartition(".")
        number = next((part for part in module.split(".") if part.isdigit()), "")
        source = self._sources[module.replace(f".{number}.", ".{i}.", 1) if number else module]

        def fetch(name: str) -> Stored:
            return self._fetch(f"{name.format(i=number)}.{end}")

        found = source(fetch) if callable(source) else fetch(source)
        if found.shape != shape:
            raise WeightsError(f"{found.label} has shape {list(found.shape)}, expected {list(shape)}")
        return found

    def _fetch(self, name: str) -> Stored:
        if name not in self._file_of:
            raise WeightsError(f"{self._directory}: tensor {name} is missing")
        file = self._directory / self._file_of[name]
        label = f"{file}: tensor {name}"
        try:
            if str(file) not in self._open:
                self._open[str(file)] = safe_open(file, framework="pt")
            return _Slice(self._open[str(file)].get_slice(name), label)
        except (SafetensorError, OSError) as error:
            raise WeightsError(f"{label} cannot be read: {_first_line(error)}") from error


class _Slice:
    def __init__(self, stored: Any, label: str):
        self._stored, self.label = stored, label
        self.shape = tuple(stored.get_shape())
        if stored.get_dtype() not in _READABLE:
            known = ", ".join(_READABLE)
            raise WeightsError(f"{label} is stored as {stored.get_dtype()}, expected one of {known}")

    def read(self, rows: slice = _ALL, columns: slice = _ALL) -> Tensor:
        try:
            part: Tensor = self._stored[rows, columns] if len(self.shape) == 2 else self._stored[rows]
        except (SafetensorError, OSError) as error:
            raise WeightsError(f"{self.label} cannot be read: {_first_line(error)}") from error
        return part


class _Stack:
    def __init__(self, parts: list[Stored]):
        self._parts = parts
        self.label = parts[0].label + "".join(" + " + part.label.rpartition(" ")[2] for part in parts[1:])
        if len({part.shape[1:] for part in parts}) > 1:
            shapes = ", ".join(str(list(part.shape)) for part in parts)
            raise WeightsError(f"{self.label} differ in width: {shapes}")
        self.shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])

    def read(self, rows: slice = _ALL, columns: slice = _ALL) -> Tensor:
        start, stop, _ = rows.indices(self.shape[0])
        found, base = [], 0
        for part in self._parts:
            first, last = max(start - base, 0), min(stop - base, part.shape[0])
            if first < last:
                found.append(part.read(slice(first, last), columns))
            base += part.shape[0]
        return found[0] if len(found) == 1 else torch.cat(found)


def _read_index(directory: Path) -> dict[str, str]:
    """Tensor name -> name of its file."""
    file, index = directory / SINGLE, directory / INDEX
    if file.is_file():
        return _read_single(file)
    if index.is_file():
        return _read_sharded(index)
    if any(directory.glob("pytorch_model*.bin")):
        remedy = "pickles are not read, run `text-generation-server convert-to-safetensors`"
        raise WeightsError(f"no safetensors weights were found in {directory}; {remedy}")
    raise WeightsError(f"{directory} holds neither {SINGLE} nor {INDEX}")


def _read_single(file: Path) -> dict[str, str]:
    try:
        with safe_open(file, framework="pt") as content:
            return dict.fromkeys(content.keys(), SINGLE)
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"{file} cannot be read: {_first_line(error)}") from error


def _read_sharded(index: Path) -> dict[str, str]:
    try:
        file_of = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        inside = all(Path(file).name == file for file in file_of.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"{index} is not an index of weights: {_first_line(error)}") from error
    if not inside:
        raise WeightsError(f"{index} names a file outside its directory")
    return dict(file_of)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
