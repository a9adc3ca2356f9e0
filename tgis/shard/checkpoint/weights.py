"""Finds checkpoint tensors by the model's module paths, and reads only the requested slices. A family's table
maps each path to a source: a plain name, `stack`, `transposed`, `grouped`, `adjacent_pairs`,
`rotated_first`, `part_of_head`, `by_group`, `interleaved`, `expert`, `by_layer`, `at_layer`, `moved` or
`first_of`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from types import TracebackType

import torch

from tgis.shard.checkpoint.format import Format
from tgis.shard.checkpoint.opening import OpenCheckpoint, open_checkpoint
from tgis.shard.checkpoint.progress import LoadProgress
from tgis.shard.checkpoint.provenance import ModuleRows, NumberedModules, list_rows, name_entry
from tgis.shard.checkpoint.tensors import (
    ALL,
    MissingTensorError,
    ReorderedRows,
    Sliced,
    StackedRows,
    Stored,
    StoredTensor,
    WeightsError,
    join_labels,
    transpose,
)

_BASES = ("model.", "backbone.", "gpt_neox.")  # places of base models in models that generate text


class StoredModules:
    """Modules of a checkpoint. Names are those of `spell_module`. `shapes` has the shapes of all
    weights found so far, as in the model."""

    def __init__(self, checkpoint: OpenCheckpoint, prefix: str, format: Format | None):
        self._checkpoint = checkpoint
        self._prefix = prefix
        self._format = format
        self._quantized: set[str] = set()  # names of modules in the checkpoint
        self.shapes: dict[str, tuple[int, ...]] = {}

    def find(self, module: str, end: str, entry: int | None, is_transposed: bool) -> Stored:
        """Return a module's tensor, or one of its entries, in the model's orientation. `end` is "weight" or
        "bias". Raises WeightsError."""
        quantized = self._open_quantized(module) if end == "weight" else None
        whole = quantized or self._fetch_plain(module, end)
        tensor: Stored = whole if entry is None else whole.entry(entry)
        # Quantization formats always store [out_features, in_features], even if the plain checkpoint does
        # not.
        if is_transposed and not quantized:
            tensor = transpose(tensor)
        if end == "weight":
            self.shapes[name_entry(module, entry)] = tensor.shape
        return tensor

    def _open_quantized(self, module: str) -> StoredTensor | None:
        if self._format is None:
            return None
        for name in spell_module(module, self._prefix):
            if (tensor := self._format.open(self._checkpoint, name)) is not None:
                self._quantized.add(name)
                return tensor
        return None

    def list_unread(self) -> Iterator[str]:
        """Yield the tensors of the checkpoint that were not fetched, as `Checkpoint.list_unread` does. Omit
        zero biases, which AutoGPTQ adds to modules without a bias. Raises WeightsError."""
        for name in self._checkpoint.list_unread():
            is_added = name.endswith(".bias") and name.removesuffix(".bias") in self._quantized
            if not is_added or self._checkpoint.fetch(name).read().any():
                yield name

    def _fetch_plain(self, module: str, end: str) -> StoredTensor:
        names = [full for name in spell_module(module, self._prefix) for full in _spell_tensor(name, end)]
        return self._checkpoint.fetch(next((name for name in names if name in self._checkpoint), names[0]))


def spell_module(module: str, prefix: str) -> tuple[str, ...]:
    """Return the names that a module may have: with or without the prefix, which may also follow `model.`.
    Checkpoints of a base model, such as transformers' LlamaModel, lack the name of its place in the model
    that generates text."""
    other = module.removeprefix(prefix) if module.startswith(prefix) else prefix + module
    names = [module, other]
    if prefix and module.startswith("model."):
        names.append(f"model.{prefix}{module.removeprefix('model.')}")
    if (base := next((base for base in _BASES if module.startswith(base)), None)) is not None:
        bare = module.removeprefix(base)
        names += [prefix + bare, bare]
    return tuple(dict.fromkeys(names))


def _spell_tensor(module: str, end: str) -> tuple[str, str]:
    """Return the names that a module's tensor may have: that of a layer, and that of a parameter, such as
    experts in one tensor."""
    return f"{module}.{end}", module if end == "weight" else f"{module}_{end}"


@dataclass(frozen=True)
class Lookup:
    """Search for one tensor of the model in a checkpoint."""

    checkpoint: OpenCheckpoint
    modules: StoredModules | NumberedModules
    layer: str
    expert: str
    end: str  # "weight" or "bias"
    is_transposed: bool = False  # the checkpoint stores matrices as [in_features, out_features]
    moved: tuple[str, str] = ("", "")  # leading part of names, and what replaces it

    def fetch(self, name: str, entry: int | None = None) -> Stored:
        """Return the tensor of a checkpoint module, or one of its entries. Raises WeightsError."""
        before, after = self.moved
        name = after + name.removeprefix(before) if name.startswith(before) else name
        module = name.format(i=self.layer, e=self.expert)
        return self.modules.find(module, self.end, entry, self.is_transposed)

    def find(self, source: "Source") -> Stored:
        return source(self) if callable(source) else self.fetch(source)


# A string is a module name in the checkpoint, with {i} for the layer number and {e} for the expert number.
Source = str | Callable[[Lookup], Stored]


def stack(*sources: Source) -> Source:
    """Join separate tensors by rows, in this order."""

    def find(lookup: Lookup) -> Stored:
        parts = [lookup.find(source) for source in sources]
        return StackedRows(parts, join_labels(part.label for part in parts))

    return find


def transposed(source: Source) -> Source:
    """Transpose a matrix that is stored [in, out]; a bias is unchanged."""
    return lambda lookup: replace(lookup, is_transposed=True).find(source)


def grouped(source: Source, num_groups: int, head_dim: int) -> Source:
    """Regroup rows [group, (q ... q, k, v), head_dim] to all q, all k, all v. In the checkpoint, the query
    rows of each group precede its key and value rows."""

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
        slices = [slice(base + start, base + stop) for start, stop in bounds for base in bases]
        return StackedRows([Sliced(stored, each) for each in slices], stored.label)

    return find


def adjacent_pairs(source: Source, head_dim: int) -> Source:
    """Reorder the rows of heads in which channels that are rotated together are adjacent, so that they are
    half a head apart."""

    def find(lookup: Lookup) -> Stored:
        stored = lookup.find(source)
        if stored.shape[0] % head_dim:
            raise WeightsError(
                f"{stored.label} has shape {list(stored.shape)}, not rows of heads of {head_dim}"
            )
        rows = torch.arange(stored.shape[0]).view(-1, head_dim // 2, 2)
        return ReorderedRows(stored, rows.transpose(1, 2).flatten())

    return find


def rotated_first(source: Source, head_dim: int, rope_dim: int, has_adjacent_pairs: bool) -> Source:
    """Move the last `rope_dim` rows of each head to its front. If channels that are rotated together are
    adjacent, reorder them as `adjacent_pairs` does."""

    def find(lookup: Lookup) -> Stored:
        stored = lookup.find(source)
        if stored.shape[0] % head_dim:
            raise WeightsError(
                f"{stored.label} has shape {list(stored.shape)}, not rows of heads of {head_dim}"
            )
        heads = torch.arange(stored.shape[0]).view(-1, head_dim)
        plain, rotated = heads[:, :-rope_dim], heads[:, -rope_dim:]
        if has_adjacent_pairs:
            rotated = rotated.reshape(len(heads), -1, 2).transpose(1, 2).flatten(1)
        return ReorderedRows(stored, torch.cat([rotated, plain], 1).flatten())

    return find


def part_of_head(source: Source, num_heads: int, rows: slice) -> Source:
    """Select rows of head {e}, where the checkpoint stores the rows of all heads one head after the other."""

    def find(lookup: Lookup) -> Stored:
        stored = lookup.find(source)
        height, rest = divmod(stored.shape[0], num_heads)
        if rest:
            raise WeightsError(
                f"{stored.label} has shape {list(stored.shape)}, not rows of {num_heads} heads"
            )
        head = int(lookup.expert)
        return Sliced(Sliced(stored, slice(head * height, (head + 1) * height)), rows)

    return find


def by_group(source: Source, num_groups: int, heights: Sequence[int], order: Sequence[int]) -> Source:
    """Regroup rows of groups, each of which consists of parts of some heights, to all groups' rows of part
    order[0], then of part order[1], and so on."""

    def find(lookup: Lookup) -> Stored:
        stored = lookup.find(source)
        height = sum(heights)
        if stored.shape[0] != num_groups * height:
            raise WeightsError(
                f"{stored.label} has shape {list(stored.shape)}, not rows of {num_groups} groups of {height}"
            )
        bounds = [slice(end - rows, end) for end, rows in zip(accumulate(heights), heights, strict=True)]
        bases = range(0, stored.shape[0], height)
        slices = [slice(base + bounds[i].start, base + bounds[i].stop) for i in order for base in bases]
        return StackedRows([Sliced(stored, each) for each in slices], stored.label)

    return find


def interleaved(source: Source, num_parts: int = 2) -> Source:
    """Regroup rows (a, b, a, b, ...) of `num_parts` matrices to all a, all b."""

    def find(lookup: Lookup) -> Stored:
        stored = lookup.find(source)
        if stored.shape[0] % num_parts:
            raise WeightsError(
                f"{stored.label} has shape {list(stored.shape)}, not rows of {num_parts} matrices"
            )
        return ReorderedRows(stored, torch.arange(stored.shape[0]).view(-1, num_parts).T.flatten())

    return find


def expert(name: str) -> Source:
    """Select entry {e} of a tensor whose first axis is the experts."""
    return lambda lookup: lookup.fetch(name, int(lookup.expert))


def by_layer(choose: Callable[[int], Source]) -> Source:
    """Use the source that `choose` returns for the number of the layer."""
    return lambda lookup: lookup.find(choose(int(lookup.layer)))


def at_layer(layer: int, source: Source) -> Source:
    """Use the source of the layer with that number."""
    return lambda lookup: replace(lookup, layer=str(layer)).find(source)


def moved(source: Source, before: str, after: str) -> Source:
    """Use the source with names that begin with `after` instead of `before`."""
    return lambda lookup: replace(lookup, moved=(before, after)).find(source)


def first_of(source: Source, *others: Source) -> Source:
    """Use the first of these sources that the checkpoint has. If it has none, raise the first source's
    error."""

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
    """Tensors of the checkpoint in `directory`, by the model's module paths. `sources` is keyed by module
    path, with {i} for the layer number and {e} for the expert number. `prefix` is a leading part of names
    that some checkpoints lack; `format` is the format of quantized weights. `checkpoint` replaces the one in
    `directory`. Leaving the context closes the files and logs how much was read; tensors that were read stay
    valid. Raises WeightsError if there are no weights."""

    def __init__(
        self,
        directory: Path,
        sources: Mapping[str, Source],
        prefix: str = "",
        format: Format | None = None,
        checkpoint: OpenCheckpoint | None = None,
    ):
        self._checkpoint = checkpoint or open_checkpoint(directory)
        self._sources = sources
        self.prefix = prefix
        self._modules = StoredModules(self._checkpoint, prefix, format)
        self._traces: dict[str, tuple[ModuleRows, ...]] = {}

    @property
    def progress(self) -> LoadProgress:
        """Progress of reading the checkpoint, which its messages describe."""
        return self._checkpoint.progress

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

    @property
    def has_scaled_matrices(self) -> bool:
        """True if matrices were multiplied by constant factors of the model."""
        return self._checkpoint.has_scaled_matrices

    def find(self, path: str, shape: tuple[int, ...]) -> Stored:
        """Find a module's tensor: `find("blocks.3.mlp.up.weight", (rows, columns))`. Raises WeightsError."""
        tensor = self._find(path, self._modules)
        if tensor.shape != shape:
            raise WeightsError(f"{tensor.label} has shape {list(tensor.shape)}, expected {list(shape)}")
        return tensor

    def find_matrix(self, module: str, shape: tuple[int, ...]) -> Stored:
        """Find a module's weight, plain or quantized: `find_matrix("blocks.3.mlp.up", (rows, columns))`.
        Raises WeightsError."""
        return self.find(f"{module}.weight", shape)

    def has(self, path: str) -> bool:
        """Return True if the checkpoint has a module's tensor. Raises WeightsError if the tensor is
        unusable."""
        try:
            self._find(path, self._modules)
        except MissingTensorError:
            return False
        return True

    def read_values(self, name: str, length: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Read the checkpoint's vector of that name, whose type need not be one of floats. Return None if
        there is none. Raises WeightsError."""
        if name not in self._checkpoint:
            return None
        tensor = self._checkpoint.fetch_any(name)
        tensor.check_type(dtype)
        tensor.check_shape(length)
        return tensor.read().clone()

    def trace(self, module: str, shape: tuple[int, int]) -> tuple[ModuleRows, ...]:
        """Return the rows of checkpoint modules that make up a matrix, without reading weights. The matrix
        must have been found before. Modules have the names in the family's sources. Of alternative names, the
        first one is used, even if the checkpoint has another: a tied head is traced to the name of a separate
        head."""
        if module not in self._traces:
            numbered = NumberedModules(self._modules.shapes, shape)
            column = self._find(f"{module}.weight", numbered).read(ALL, slice(0, 1))[:, 0]  # [num_rows]
            self._traces[module] = list_rows(column, numbered.modules)
        return self._traces[module]

    def list_unread(self) -> Iterator[str]:
        """Yield the tensors of the checkpoint that the model does not use although they may affect its
        results. Raises WeightsError."""
        return self._modules.list_unread()

    def release(self) -> None:
        """Close the files. The next read opens them again."""
        self._checkpoint.close()

    def _find(self, path: str, modules: StoredModules | NumberedModules) -> Stored:
        module, _, end = path.rpartition(".")
        numbers = [part for part in module.split(".") if part.isdigit()]
        layer, expert, *_ = (*numbers, "", "")
        key = module.replace(f".{layer}.", ".{i}.", 1) if layer else module
        key = key.replace(f".{expert}.", ".{e}.", 1) if expert else key
        return Lookup(self._checkpoint, modules, layer, expert, end).find(self._sources[key])
