"""Finds the tensors of a checkpoint by the module paths of the model; only the requested slices are read. A
family's table of sources maps each path to tensors. A source is a plain name, or one of `stack`,
`transposed`, `grouped`, `expert` and `first_of`."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from tgis.shard.checkpoint.files import Checkpoint
from tgis.shard.checkpoint.provenance import ModuleRows, NumberedCheckpoint, NumberedTensor, list_rows
from tgis.shard.checkpoint.tensors import (
    ALL,
    FileTensor,
    MissingTensorError,
    RowRange,
    StackedRows,
    Stored,
    Transposed,
    WeightsError,
    join_labels,
)


@dataclass(frozen=True)
class Lookup:
    """Tensor of the model that is looked for, and the checkpoint to search."""

    checkpoint: Checkpoint | NumberedCheckpoint
    prefix: str
    layer: str
    expert: str
    end: str  # "weight" or "bias"

    def fetch(self, name: str) -> FileTensor | NumberedTensor:
        """Return the tensor of a module of the checkpoint. The checkpoint's name may lack the prefix, or have
        it if `name` does not. Raises WeightsError."""
        full = f"{name.format(i=self.layer, e=self.expert)}.{self.end}"
        other = full.removeprefix(self.prefix) if full.startswith(self.prefix) else self.prefix + full
        is_other = full not in self.checkpoint and other in self.checkpoint
        return self.checkpoint.fetch(other if is_other else full)

    def find(self, source: "Source") -> Stored:
        return source(self) if callable(source) else self.fetch(source)


# A string is a module's name in the checkpoint, with {i} for the layer's number and {e} for the expert's.
Source = str | Callable[[Lookup], Stored]


def stack(*sources: Source) -> Source:
    """Pack separate tensors row-wise, in this order."""

    def find(lookup: Lookup) -> Stored:
        parts = [lookup.find(source) for source in sources]
        return StackedRows(parts, join_labels(part.label for part in parts))

    return find


def transposed(source: Source) -> Source:
    """Transpose a matrix that is stored [in, out]; a bias stays as it is."""
    return lambda lookup: Transposed(lookup.find(source))


def grouped(source: Source, num_groups: int, head_dim: int) -> Source:
    """Regroup rows [group, (q ... q, k, v), head_dim] to all q, all k, all v. In the checkpoint, the queries
    of each group are beside the key and value that they share."""

    def find(lookup: Lookup) -> Stored:
        stored = lookup.find(source)
        rows, rest = divmod(stored.shape[0], num_groups)  # rows of one group
        if rest or rows % head_dim or rows < 3 * head_dim:
            raise WeightsError(
                f"{stored.label} has shape {list(stored.shape)}, not rows of {num_groups} groups of queries, "
                f"a key and a value of {head_dim}"
            )
        bounds = ((0, rows - 2 * head_dim), (rows - 2 * head_dim, rows - head_dim), (rows - head_dim, rows))
        bases = range(0, stored.shape[0], rows)
        windows = [RowRange(stored, base + start, base + stop) for start, stop in bounds for base in bases]
        return StackedRows(windows, stored.label)

    return find


def expert(name: str) -> Source:
    """Take entry {e} of a tensor whose first axis is the experts."""
    return lambda lookup: lookup.fetch(name).entry(int(lookup.expert))


def first_of(source: Source, *others: Source) -> Source:
    """Take the first of these sources that the checkpoint has. If none, raise the first one's error."""

    def find(lookup: Lookup) -> Stored:
        try:
            return lookup.find(source)
        except MissingTensorError:
            for other in others:
                try:
                    return lookup.find(other)
                except MissingTensorError:
                    continue
            raise

    return find


class Weights:
    """Tensors of the checkpoint in `directory`, by the module paths of the model. `sources` is keyed by
    module path, with {i} for the layer's number and {e} for the expert's. `prefix` is the leading part of
    names that some checkpoints lack. Leaving the context closes the files and logs how much was read; tensors
    that were read stay valid. Raises WeightsError if there are no weights."""

    def __init__(self, directory: Path, sources: Mapping[str, Source], prefix: str = ""):
        self._checkpoint, self._sources, self.prefix = Checkpoint(directory), sources, prefix
        self._traces: dict[str, tuple[ModuleRows, ...]] = {}

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
        """Find a module's tensor: `find("blocks.3.mlp.up.weight", (rows, columns))`. Raises WeightsError."""
        found = self._find(path, self._checkpoint)
        if found.shape != shape:
            raise WeightsError(f"{found.label} has shape {list(found.shape)}, expected {list(shape)}")
        return found

    def has(self, path: str) -> bool:
        """Return True if the checkpoint has a module's tensor. Raises WeightsError if it cannot be used."""
        try:
            self._find(path, self._checkpoint)
        except MissingTensorError:
            return False
        return True

    def trace(self, path: str, shape: tuple[int, int]) -> tuple[ModuleRows, ...]:
        """Return the rows of the checkpoint's modules that make up a matrix, which must have been found
        before. Reads no weights. Modules have the names of the family's sources. Of alternatives, the first
        one's name is used, whichever the checkpoint has: a tied head is traced to the name that a separate
        head would have."""
        if path not in self._traces:
            numbers = NumberedCheckpoint(self._checkpoint.shapes, self.prefix, shape)
            column = self._find(path, numbers).read(ALL, slice(0, 1))[:, 0]  # [num_rows]
            self._traces[path] = list_rows(column, numbers.modules)
        return self._traces[path]

    def list_unread(self) -> Iterator[str]:
        """Yield the tensors of the checkpoint that were not fetched, as `Checkpoint.list_unread` does."""
        return self._checkpoint.list_unread()

    def release(self) -> None:
        """Close the files. They are opened again when something is read."""
        self._checkpoint.close()

    def _find(self, path: str, checkpoint: Checkpoint | NumberedCheckpoint) -> Stored:
        module, _, end = path.rpartition(".")
        numbers = [part for part in module.split(".") if part.isdigit()]
        layer, expert, *_ = (*numbers, "", "")
        key = module.replace(f".{layer}.", ".{i}.", 1) if layer else module
        key = key.replace(f".{expert}.", ".{e}.", 1) if expert else key
        return Lookup(checkpoint, self.prefix, layer, expert, end).find(self._sources[key])
