"""Reads GGUF files as if they were the original checkpoint: same tensor names, same order of rows."""

import mmap
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tgis.convert.gguf.architectures import find_architecture
from tgis.convert.gguf.files import FileTensorPlace, open_gguf
from tgis.convert.gguf.tensor_names import GgufSource, StoredForm, list_sources
from tgis.errors import OperatorError
from tgis.shard.checkpoint.format import Format
from tgis.shard.checkpoint.gguf.tensor import Bytes, GgufExperts, GgufStack, GgufTensor
from tgis.shard.checkpoint.progress import LoadProgress
from tgis.shard.checkpoint.tensors import (
    FileTensor,
    MissingTensorError,
    Sliced,
    StackedRows,
    Stored,
    StoredTensor,
    TensorInMemory,
    Transposed,
    WeightsError,
)
from tgis.shard.memory.host_limits import release_memory

RELEASE_BYTES = 64 << 20  # read pages count as memory until the file is unmapped


class GgufCheckpoint:
    """Tensors of a model's GGUF files, by name. Raises WeightsError."""

    def __init__(self, paths: Sequence[Path]):
        try:
            self.files = open_gguf(paths)
            architecture = find_architecture(self.files)
            self._sources = list_sources(self.files, architecture.names)
        except OperatorError as error:
            raise WeightsError(str(error)) from error
        self.has_scaled_matrices = architecture.has_scaled_matrices
        self._mapped: dict[Path, mmap.mmap] = {}
        self._taken: dict[str, set[int]] = {}
        self._unreleased_bytes = 0
        self.progress = LoadProgress(sum(tensor.place.num_bytes for tensor in self.files.tensors.values()))

    def __contains__(self, name: str) -> bool:
        return name in self._sources

    def list_names(self) -> Iterator[str]:
        return iter(self._sources)

    def fetch(self, name: str) -> StoredTensor:
        """Return a tensor without reading its elements. Raises WeightsError."""
        source = self._sources.get(name)
        if source is None:
            raise MissingTensorError(f"{self.files.paths[0]}: tensor {name} is missing")
        taken = self._taken.setdefault(name, set())
        places = [self.files.tensors[each] for each in source.names]
        label = f"{places[0].path}: tensor {' + '.join(source.names)}"
        if source.form in (StoredForm.EXPERTS, StoredForm.INTERLEAVED_EXPERTS):
            experts = range(places[0].place.shape[0])
            parts = [[self._open(place, source, entry) for place in places] for entry in experts]
            return GgufExperts(parts, label, taken, source.form is StoredForm.INTERLEAVED_EXPERTS)
        if source.form is StoredForm.LATENT_HEADS:
            return self._join_heads(places, source, label)
        if source.form is StoredForm.KEY_GROUPS:
            return self._join_groups(places, source, label)
        if len(places[0].place.shape) > 2 and source.entry is None:
            stacks = [
                [self._open(place, source, entry) for entry in range(place.place.shape[0])]
                for place in places
            ]
            if len({len(stack) for stack in stacks}) > 1:
                raise WeightsError(f"{label} have different numbers of experts")
            return GgufStack(stacks, label, taken)
        if len(places) > 1:
            return _JoinedTensor([self._open(place, source, None) for place in places], label)
        tensor = self._open(places[0], source, source.entry)
        if source.form is not None:
            return _ReshapedTensor(_reshape(tensor, source.form), label)
        return _TransposedTensor(tensor) if source.is_transposed and len(tensor.shape) > 1 else tensor

    def fetch_any(self, name: str) -> FileTensor:
        """Return a tensor whose elements are all read at once. Raises WeightsError."""
        tensor = self.fetch(name)
        return FileTensor(tensor.read, tensor.label, self._count, set())

    def count_elements(self, format: Format | None) -> int:
        """Count the elements of all matrices."""
        return sum(self.count_by_type().values())

    def count_by_type(self) -> Counter[str]:
        """Count the elements of all matrices by type."""
        counts: Counter[str] = Counter()
        for tensor in self.files.tensors.values():
            if len(tensor.place.shape) > 1:
                counts[tensor.place.type.name] += prod(tensor.place.shape)
        return counts

    def list_unread(self) -> Iterator[str]:
        """Yield the name of every tensor that was not fetched, and the first missing entry of each stack."""
        for name, source in self._sources.items():
            taken = self._taken.get(name)
            shape = self.files.tensors[source.names[0]].place.shape
            if taken is None:
                yield name
            elif taken and (left := set(range(shape[0])) - taken):
                yield f"{name}[{min(left)}]"

    def close(self) -> None:
        """Close the files. Tensors that were read stay valid."""
        self._mapped.clear()

    def _join_heads(self, places: Sequence[FileTensorPlace], source: GgufSource, label: str) -> StoredTensor:
        """Return the rows of each head's keys and values, one head after the other."""
        shapes = [place.place.shape for place in places]
        if len(shapes) != 2 or any(len(shape) != 3 for shape in shapes) or shapes[0][0] != shapes[1][0]:
            raise WeightsError(f"{label} are not the keys and the values of the same heads")
        parts: list[Stored] = []
        for head in range(shapes[0][0]):
            keys, values = (self._open(place, source, head) for place in places)
            parts += [Transposed(keys), values]
        return _JoinedTensor(parts, label)

    def _join_groups(self, places: Sequence[FileTensorPlace], source: GgufSource, label: str) -> StoredTensor:
        """Return the rows of each key head's queries, keys, values and gates, one key head after the
        other."""
        num_groups = self.files.metadata.integer(".ssm.group_count")
        heights = [place.place.shape[0] for place in places]
        if len(heights) != 2 or not num_groups or heights[1] % num_groups:
            raise WeightsError(f"{label} are not the rows of {num_groups} key heads")
        size, rest = divmod(heights[0] - heights[1], 2 * num_groups)
        if rest or size <= 0:
            raise WeightsError(f"{label} are not the rows of {num_groups} key heads")
        projections, gates = (self._open(place, source, None) for place in places)
        width = heights[1] // num_groups
        keys = size * num_groups
        parts: list[Stored] = []
        for group in range(num_groups):
            first, shared = size * group, width * group
            parts += [
                Sliced(projections, slice(first, first + size)),
                Sliced(projections, slice(keys + first, keys + first + size)),
                Sliced(projections, slice(2 * keys + shared, 2 * keys + shared + width)),
                Sliced(gates, slice(shared, shared + width)),
            ]
        return _JoinedTensor(parts, label)

    def _open(self, tensor: FileTensorPlace, source: GgufSource, entry: int | None) -> GgufTensor:
        place = tensor.place
        shape = place.shape
        label = f"{tensor.path}: tensor {place.name}"
        if entry is not None:
            shape = shape[1:]
            label = f"{label}[{entry}]"
        if len(shape) > 2:
            raise WeightsError(f"{label} has shape {list(place.shape)}, expected a vector or a matrix")
        if source.added and place.type.name != "F32":
            raise WeightsError(f"{label} is stored as {place.type.name}, expected F32")
        order = _find_order(source, shape[0], label)
        get_rows = partial(self._get_rows, tensor, entry)
        return GgufTensor(get_rows, shape, place.type, label, self._count, order, source.added)

    def _get_rows(self, tensor: FileTensorPlace, entry: int | None) -> Bytes:
        """Return the bytes of a tensor or one of its entries, [num_rows, row_bytes], in mapped memory."""
        place = tensor.place
        whole = np.frombuffer(self._map(tensor.path), np.uint8, place.num_bytes, place.start)
        row_bytes = place.shape[-1] // place.type.block_elements * place.type.block_bytes
        rows = whole.reshape(-1, row_bytes)
        return rows if entry is None else rows.reshape(place.shape[0], -1, row_bytes)[entry]

    def _map(self, path: Path) -> mmap.mmap:
        mapped = self._mapped.get(path)
        if mapped is None:
            try:
                with path.open("rb") as content:
                    mapped = mmap.mmap(content.fileno(), 0, access=mmap.ACCESS_COPY)
            except OSError as error:
                raise WeightsError(f"{path} cannot be read: {error.strerror}") from error
            self._mapped[path] = mapped
        return mapped

    def _count(self, label: str, whole_bytes: int, read_bytes: int) -> None:
        self.progress.add(label, whole_bytes, read_bytes)
        self._unreleased_bytes += read_bytes
        if self._unreleased_bytes > RELEASE_BYTES:
            self._unreleased_bytes = 0
            self._mapped.clear()
            release_memory()


class _TransposedTensor(Transposed):
    def entry(self, index: int) -> StoredTensor:
        raise WeightsError(f"{self.label} has shape {list(self.shape)}, no entry {index}")


class _ReshapedTensor(TensorInMemory):
    def entry(self, index: int) -> StoredTensor:
        raise WeightsError(f"{self.label} has shape {list(self.shape)}, no entry {index}")


class _JoinedTensor(StackedRows):
    def entry(self, index: int) -> StoredTensor:
        raise WeightsError(f"{self.label} has shape {list(self.shape)}, no entry {index}")


def _reshape(tensor: GgufTensor, form: StoredForm) -> Tensor:
    """Return a small tensor in the checkpoint's form."""
    stored = tensor.read()
    if form is StoredForm.KERNEL:
        return stored.unsqueeze(1)
    if form is StoredForm.ROW:
        return stored.view(1, -1)
    vector = stored.flatten()
    return (-vector).log() if form is StoredForm.DECAY else vector


def _find_order(source: GgufSource, num_rows: int, label: str) -> NDArray[np.int64] | None:
    if source.order is None:
        return None
    try:
        return source.order.index(num_rows)
    except (ValueError, ZeroDivisionError) as error:
        raise WeightsError(
            f"{label} has {num_rows} rows, which is no multiple of the number of heads"
        ) from error
