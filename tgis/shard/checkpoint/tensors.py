"""Tensors of a checkpoint that can be read in parts: those of a file, and views that slice and join them."""

import logging
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from tgis.errors import OperatorError

logger = logging.getLogger(__name__)

ALL = slice(None)
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class WeightsError(OperatorError):
    """Error: the checkpoint cannot be used. Its text is one line that names the file and any tensor."""


class MissingTensorError(WeightsError):
    """Error: the checkpoint has no tensor of that name."""


class Stored(Protocol):
    """Tensor of which parts can be read."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def label(self) -> str:
        """File and name, for messages."""

    def read(self, rows: slice = ALL, columns: slice = ALL) -> Tensor:
        """Return the part in its stored type: float32, float16 or bfloat16, contiguous. Vectors have rows
        only. The result may be the file's mapped memory: callers must not write to it, and must copy what
        they keep. Raises WeightsError."""


class FileTensor:
    """Tensor in a mapped file. For every part that is read, `count` is called with the tensor's label and
    bytes and the part's bytes. The index of every requested entry is added to `taken`."""

    def __init__(self, mapped: Tensor, label: str, count: Callable[[str, int, int], None], taken: set[int]):
        self._mapped, self.label, self._count, self._taken = mapped, label, count, taken
        self.shape = tuple(mapped.shape)
        if mapped.dtype not in DTYPES.values():
            dtype, expected = str(mapped.dtype).removeprefix("torch."), ", ".join(DTYPES)
            raise WeightsError(f"{label} is stored as {dtype}, expected one of {expected}")
        if not self.shape:
            raise WeightsError(f"{label} is a scalar, expected a vector or a matrix")

    def entry(self, index: int) -> "FileTensor":
        """Return the tensor at that index of the first axis. Raises WeightsError if there is none."""
        if index >= self.shape[0] or len(self.shape) == 1:
            raise WeightsError(f"{self.label} has shape {list(self.shape)}, no entry {index}")
        self._taken.add(index)
        return FileTensor(self._mapped[index], f"{self.label}[{index}]", self._count, set())

    def read(self, rows: slice = ALL, columns: slice = ALL) -> Tensor:
        part = self._mapped[rows, columns] if len(self.shape) > 1 else self._mapped[rows]
        part = part.contiguous()
        self._count(self.label, self._mapped.nbytes, part.nbytes)
        # Only warn: some checkpoints have such rows for unused tokens. Requests whose logits are not finite
        # get an error each.
        if part.numel() and not all(bound.isfinite() for bound in part.aminmax()):
            logger.warning("%s holds numbers that are not finite", self.label)
        return part


class Transposed:
    """View of a matrix that is stored [in, out]; vectors stay as they are."""

    def __init__(self, stored: Stored):
        self._stored, self.label, self.shape = stored, stored.label, stored.shape[::-1]

    def read(self, rows: slice = ALL, columns: slice = ALL) -> Tensor:
        if len(self.shape) == 1:
            return self._stored.read(rows)
        return self._stored.read(columns, rows).T.contiguous()


class RowRange:
    """View of consecutive rows."""

    def __init__(self, stored: Stored, start: int, stop: int):
        self._stored, self._start, self.label = stored, start, stored.label
        self.shape = (stop - start, *stored.shape[1:])

    def read(self, rows: slice = ALL, columns: slice = ALL) -> Tensor:
        start, stop, _ = rows.indices(self.shape[0])
        return self._stored.read(slice(self._start + start, self._start + stop), columns)


class StackedRows:
    """View of several tensors of equal width, concatenated by rows."""

    def __init__(self, parts: Sequence[Stored], label: str):
        self._parts, self.label = parts, label
        if len({part.shape[1:] for part in parts}) > 1:
            shapes = ", ".join(str(list(part.shape)) for part in parts)
            raise WeightsError(f"{label} differ in width: {shapes}")
        self._ends = list(accumulate(part.shape[0] for part in parts))
        self.shape = (self._ends[-1], *parts[0].shape[1:])

    def read(self, rows: slice = ALL, columns: slice = ALL) -> Tensor:
        start, stop, _ = rows.indices(self.shape[0])
        found = []
        for i in range(bisect_right(self._ends, start), len(self._parts)):
            base = self._ends[i] - self._parts[i].shape[0]
            if base >= stop:
                break
            found.append(self._parts[i].read(slice(max(start - base, 0), stop - base), columns))
        if not found:
            return self._parts[0].read(slice(0, 0), columns)
        return found[0] if len(found) == 1 else torch.cat(found)


def join_labels(labels: Iterable[str]) -> str:
    """Join labels: file and name of the first tensor, then the names of the others."""
    first, *others = labels
    return first + "".join(" + " + label.rpartition(" ")[2] for label in others)
