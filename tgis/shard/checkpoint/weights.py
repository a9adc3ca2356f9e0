"""The tensors of a checkpoint under the names of our modules; only the slices that are asked for are read.

A family's table says where each of our modules finds its tensors, in the words below: a plain name, `stack`,
`transposed`, `grouped`, `expert` and `first_of`."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol

from tgis.shard.checkpoint.files import Checkpoint
from tgis.shard.checkpoint.provenance import Numbers, Rows, list_rows
from tgis.shard.checkpoint.tensors import (
    ALL,
    MissingTensorError,
    Stack,
    Stored,
    Transposed,
    WeightsError,
    Window,
    join_labels,
)


class Entries(Stored, Protocol):
    def entry(self, index: int) -> Stored: ...


class Holder(Protocol):
    """A checkpoint, or what stands for one."""

    def __contains__(self, name: str) -> bool: ...
    def fetch(self, name: str) -> Entries: ...


@dataclass(frozen=True)
class Place:
    """Whose tensor is looked for, and in what checkpoint."""

    checkpoint: Holder
    prefix: str
    layer: str
    expert: str
    end: str  # "weight" or "bias"

    def fetch(self, name: str) -> Entries:
        """The tensor of a module of the checkpoint, which may lack the prefix, or have it where `name` does
        not. Raises WeightsError."""
        full = f"{name.format(i=self.layer, e=self.expert)}.{self.end}"
        other = full.removeprefix(self.prefix) if full.startswith(self.prefix) else self.prefix + full
        is_other = full not in self.checkpoint and other in self.checkpoint
        return self.checkpoint.fetch(other if is_other else full)

    def find(self, source: "Source") -> Stored:
        return source(self) if callable(source) else self.fetch(source)


# A name is that of a module in the checkpoint, with {i} for the layer's number and {e} for the expert's.
Source = str | Callable[[Place], Stored]


def stack(*sources: Source) -> Source:
    """Separate tensors, packed row-wise in this order."""

    def find(place: Place) -> Stored:
        parts = [place.find(source) for source in sources]
        return Stack(parts, join_labels(part.label for part in parts))

    return find


def transposed(source: Source) -> Source:
    """Stored [in, out]; a bias is as it is."""
    return lambda place: Transposed(place.find(source))


def grouped(source: Source, num_groups: int, head_dim: int) -> Source:
    """Rows [group, (q ... q, k, v), head_dim], the queries of every group beside the key and value that they
    share; becomes all q, all k, all v."""

    def find(place: Place) -> Stored:
        stored = place.find(source)
        rows, rest = divmod(stored.shape[0], num_groups)  # of one group
        if rest or rows % head_dim or rows < 3 * head_dim:
            raise WeightsError(
                f"{stored.label} has shape {list(stored.shape)}, not rows of {num_groups} groups of queries, "
                f"a key and a value of {head_dim}"
            )
        bounds = ((0, rows - 2 * head_dim), (rows - 2 * head_dim, rows - head_dim), (rows - head_dim, rows))
        bases = range(0, stored.shape[0], rows)
        windows = [Window(stored, base + start, base + stop) for start, stop in bounds for base in bases]
        return Stack(windows, stored.label)

    return find


def expert(name: str) -> Source:
    """The entry {e} of a tensor whose first axis is the experts."""
    return lambda place: place.fetch(name).entry(int(place.expert))


def first_of(source: Source, *others: Source) -> Source:
    """The first of these that the checkpoint has; where it has none, the error is that of the first."""

    def find(place: Place) -> Stored:
        try:
            return place.find(source)
        except MissingTensorError:
            for other in others:
                try:
                    return place.find(other)
                except MissingTensorError:
                    continue
            raise

    return find


class Weights:
    """The tensors of the checkpoint in `directory`.

    `sources` is keyed by module path, with the layer's number as {i} and the expert's as {e}. `prefix` is the
    leading part of names that some checkpoints lack. Closed, it logs what was read; tensors that were read
    stay valid. Raises WeightsError where the directory holds no weights."""

    def __init__(self, directory: Path, sources: Mapping[str, Source], prefix: str = ""):
        self._checkpoint, self._sources, self.prefix = Checkpoint(directory), sources, prefix
        self._traces: dict[str, tuple[Rows, ...]] = {}

    def __enter__(self) -> "Weights":
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()
        if error is None:
            self._checkpoint.progress.finish()

    def find(self, path: str, shape: tuple[int, ...]) -> Stored:
        """The tensor of a module, `find("blocks.3.mlp.up.weight", (rows, columns))`. Raises WeightsError."""
        found = self._find(path, self._checkpoint)
        if found.shape != shape:
            raise WeightsError(f"{found.label} has shape {list(found.shape)}, expected {list(shape)}")
        return found

    def has(self, path: str) -> bool:
        """Whether the checkpoint has a module's tensor. Raises WeightsError where it cannot be used."""
        try:
            self._find(path, self._checkpoint)
        except MissingTensorError:
            return False
        return True

    def trace(self, path: str, shape: tuple[int, int]) -> tuple[Rows, ...]:
        """Of which rows of which modules a matrix is made that was found before; reads no weights.

        Modules are called as the family's sources call them. Where these try several, it is by the first,
        whichever the checkpoint has: a tied head is traced to the name that a head of its own would have."""
        if path not in self._traces:
            numbers = Numbers(self._checkpoint.shapes, self.prefix, shape)
            column = self._find(path, numbers).read(ALL, slice(0, 1))[:, 0]  # [num_rows]
            self._traces[path] = list_rows(column, numbers.modules)
        return self._traces[path]

    def list_unread(self) -> Iterator[str]:
        """Yield the tensors of the checkpoint that were not looked for, as `Checkpoint.list_unread` does."""
        return self._checkpoint.list_unread()

    def release(self) -> None:
        """Closes the files; they are opened again when something is read."""
        self._checkpoint.close()

    def _find(self, path: str, holder: Holder) -> Stored:
        module, _, end = path.rpartition(".")
        numbers = [part for part in module.split(".") if part.isdigit()]
        layer, expert, *_ = (*numbers, "", "")
        key = module.replace(f".{layer}.", ".{i}.", 1) if layer else module
        key = key.replace(f".{expert}.", ".{e}.", 1) if expert else key
        return Place(holder, self.prefix, layer, expert, end).find(self._sources[key])
