"""Tensors of a checkpoint that can be read in parts: tensors in files, and views that slice and join them."""

import logging
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, groupby
from typing import Protocol

import torch
from torch import Tensor

from tgis.errors import OperatorError
from tgis.shard.checkpoint.codes import CodeLayout, Codes, join_rows, take_rows

logger = logging.getLogger(__name__)

ALL = slice(None)
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class WeightsError(OperatorError):
    """Error when the checkpoint cannot be used. Its text is one line that names the file and the tensor, if
    any."""


class MissingTensorError(WeightsError):
    """Error when the checkpoint has no tensor of that name."""


class Stored(Protocol):
    """Tensor that can be read in parts."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def label(self) -> str:
        """File and name, for messages."""

    def read(self, rows: slice = ALL, columns: slice = ALL) -> Tensor:
        """Return the part, contiguous, in its stored type: float32, float16 or bfloat16. Vectors have only
        rows. The result may be the file's mapped memory: callers must not write to it, and must copy data
        that they keep. Raises WeightsError."""

    def layout(self, columns: slice = ALL) -> CodeLayout | None:
        """Return the layout of the codes of these columns, or None if they can only be read as floats."""

    def codes(self, rows: slice = ALL, columns: slice = ALL) -> Codes:
        """Return the part as codes, for columns that have a `layout`. Raises WeightsError."""


class StoredTensor(Stored, Protocol):
    """Tensor of a checkpoint, which may be a stack of matrices."""

    def entry(self, index: int) -> Stored:
        """Return the tensor at that index of the first axis. Raises WeightsError if there is none."""


class FloatsOnly:
    """Base class of tensors without codes."""

    def layout(self, columns: slice = ALL) -> CodeLayout | None:
        return None

    def codes(self, rows: slice = ALL, columns: slice = ALL) -> Codes:
        raise AssertionError("the tensor has no codes")


class FileTensor(FloatsOnly):
    """Tensor in a file. `get_mapped` returns it in mapped memory. Each read calls it again, so that pages
    that were read can be released. For every part that is read, `count` is called with the label, the
    tensor's bytes and the part's bytes. The index of every requested entry is added to `taken`."""

    def __init__(
        self,
        get_mapped: Callable[[], Tensor],
        label: str,
        count: Callable[[str, int, int], None],
        taken: set[int],
    ):
        self.label = label
        self._get_mapped = get_mapped
        self._count = count
        self._taken = taken
        mapped = get_mapped()
        self.shape = tuple(mapped.shape)
        self.dtype = mapped.dtype
        self._num_bytes = mapped.nbytes

    def check_plain(self) -> None:
        """Raise WeightsError unless this is a vector or a matrix of floats."""
        self.check_type(*DTYPES.values())
        if not self.shape:
            raise WeightsError(f"{self.label} is a scalar, expected a vector or a matrix")

    def check_type(self, *dtypes: torch.dtype) -> None:
        """Raise WeightsError unless the elements have one of these types."""
        if self.dtype not in dtypes:
            actual, *expected = (str(each).removeprefix("torch.") for each in (self.dtype, *dtypes))
            one_of = "one of " if len(expected) > 1 else ""
            raise WeightsError(f"{self.label} is stored as {actual}, expected {one_of}{', '.join(expected)}")

    def check_shape(self, *shape: int) -> None:
        """Raise WeightsError unless the tensor has this shape."""
        if self.shape != shape:
            raise WeightsError(f"{self.label} has shape {list(self.shape)}, expected {list(shape)}")

    def as_bytes(self) -> "FileTensor":
        """Return the elements' bytes, uint8 [num_bytes]."""

        def get_bytes() -> Tensor:
            return self._get_mapped().contiguous().flatten().view(torch.uint8)

        return FileTensor(get_bytes, self.label, self._count, set())

    def entry(self, index: int) -> "FileTensor":
        if index >= self.shape[0] or len(self.shape) == 1:
            raise WeightsError(f"{self.label} has shape {list(self.shape)}, no entry {index}")
        self._taken.add(index)
        return FileTensor(lambda: self._get_mapped()[index], f"{self.label}[{index}]", self._count, set())

    def read(self, rows: slice = ALL, columns: slice = ALL) -> Tensor:
        part = self._get_mapped()[(rows, columns)[: len(self.shape)]].contiguous()
        self._count(self.label, self._num_bytes, part.nbytes)
        # This is only a warning, because some checkpoints have such rows for unused tokens. A request fails
        # if its own logits are not finite.
        if (
            self.dtype in DTYPES.values()
            and part.numel()
            and not all(bound.isfinite() for bound in part.aminmax())
        ):
            logger.warning("%s holds numbers that are not finite", self.label)
        return part


class TensorInMemory(FloatsOnly):
    """Vector or matrix of floats in memory."""

    def __init__(self, tensor: Tensor, label: str):
        self._tensor = tensor
        self.label = label
        self.shape = tuple(tensor.shape)

    def read(self, rows: slice = ALL, columns: slice = ALL) -> Tensor:
        return self._tensor[(rows, columns)[: len(self.shape)]].contiguous()


class Transposed(FloatsOnly):
    """View of a matrix that is stored [in, out]; vectors are unchanged."""

    def __init__(self, stored: Stored):
        self.original = stored
        self.label = stored.label
        self.shape = stored.shape[::-1]

    def read(self, rows: slice = ALL, columns: slice = ALL) -> Tensor:
        if len(self.shape) == 1:
            return self.original.read(rows)
        return self.original.read(columns, rows).T.contiguous()


def transpose(stored: Stored) -> Stored:
    """Return a transposed view. For a transposed view, return the original matrix, which may have codes."""
    return stored.original if isinstance(stored, Transposed) else Transposed(stored)


class ScaledColumns(FloatsOnly):
    """View of a matrix whose columns are multiplied by factors, float32 [num_columns]."""

    def __init__(self, stored: Stored, factors: Tensor):
        self._stored = stored
        self._factors = factors
        self.label = stored.label
        self.shape = stored.shape

    def read(self, rows: slice = ALL, columns: slice = ALL) -> Tensor:
        return self._stored.read(rows, columns).float() * self._factors[columns]


class Sliced:
    """View of consecutive rows and columns of a matrix, or of consecutive elements of a vector."""

    def __init__(self, stored: Stored, rows: slice, columns: slice = ALL):
        self.original = stored
        self.label = stored.label
        self._ranges = [range(size)[part] for size, part in zip(stored.shape, (rows, columns), strict=False)]
        self.shape = tuple(len(each) for each in self._ranges)

    def read(self, rows: slice = ALL, columns: slice = ALL) -> Tensor:
        return self.original.read(*self.shift(rows, columns))

    def layout(self, columns: slice = ALL) -> CodeLayout | None:
        return self.original.layout(*self.shift(ALL, columns)[1:])

    def codes(self, rows: slice = ALL, columns: slice = ALL) -> Codes:
        return self.original.codes(*self.shift(rows, columns))

    def shift(self, *parts: slice) -> list[slice]:
        """Convert slices of this view to slices of the original tensor."""
        shifted = [each[part] for each, part in zip(self._ranges, parts, strict=False)]
        return [slice(each.start, each.stop) for each in shifted]


class ReorderedRows:
    """View of a matrix or vector with its rows in another order. Row i is row order[i] of the original."""

    def __init__(self, stored: Stored, order: Tensor):
        self._original = stored
        self._order = order
        self.label = stored.label
        self.shape = stored.shape

    def read(self, rows: slice = ALL, columns: slice = ALL) -> Tensor:
        covering, places = self._find(rows)
        return self._original.read(covering, columns).index_select(0, places)

    def layout(self, columns: slice = ALL) -> CodeLayout | None:
        return self._original.layout(columns)

    def codes(self, rows: slice = ALL, columns: slice = ALL) -> Codes:
        covering, places = self._find(rows)
        return take_rows(self._original.codes(covering, columns), places)

    def _find(self, rows: slice) -> tuple[slice, Tensor]:
        """Return consecutive original rows that include these rows, and their places there."""
        order = self._order[rows]
        if not len(order):
            return slice(0, 0), order
        first = int(order.min())
        return slice(first, int(order.max()) + 1), order - first


class StackedRows:
    """View of several tensors of equal width, concatenated by rows."""

    def __init__(self, parts: Sequence[Stored], label: str):
        self._parts = parts
        self.label = label
        if len({part.shape[1:] for part in parts}) > 1:
            shapes = ", ".join(str(list(part.shape)) for part in parts)
            raise WeightsError(f"{label} have different widths: {shapes}")
        self._ends = list(accumulate(part.shape[0] for part in parts))
        self.shape = (self._ends[-1], *parts[0].shape[1:])

    def read(self, rows: slice = ALL, columns: slice = ALL) -> Tensor:
        tensors = [part.read(own, columns) for part, own in self.list_parts(rows)]
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors)

    def layout(self, columns: slice = ALL) -> CodeLayout | None:
        first, *others = {part.layout(columns) for part in self._parts}
        if others or first is None:
            return None
        # Each part may have its own column order, but a matrix product supports only one.
        return first if not first.is_reordered or self._have_same_order(columns) else None

    def codes(self, rows: slice = ALL, columns: slice = ALL) -> Codes:
        codes = [part.codes(own, columns) for part, own in self.list_parts(rows)]
        return codes[0] if len(codes) == 1 else join_rows(codes)

    def _have_same_order(self, columns: slice) -> bool:
        first, *others = (part.codes(slice(0, 0), columns).group_of for part in self._parts)
        return first is not None and all(each is not None and torch.equal(first, each) for each in others)

    def list_parts(self, rows: slice) -> Iterator[tuple[Stored, slice]]:
        """Yield the parts that contain some of the rows, each with the slice of its own rows. If `rows` is
        empty, yield one part with an empty slice."""
        start, stop, _ = rows.indices(self.shape[0])
        if start >= stop:
            yield self._parts[0], slice(0, 0)
            return
        for i in range(bisect_right(self._ends, start), len(self._parts)):
            base = self._ends[i] - self._parts[i].shape[0]
            if base >= stop:
                break
            yield self._parts[i], slice(max(start - base, 0), stop - base)


def read_pieces(stored: Stored, num_elements: int, multiple: int = 1) -> Iterator[tuple[slice, Tensor]]:
    """Read a matrix in pieces of about `num_elements` elements, with a number of rows that is a multiple of
    `multiple`. Yield the rows and the piece."""
    height, width = stored.shape
    num_rows = max(1, num_elements // (multiple * width)) * multiple
    for first in range(0, height, num_rows):
        rows = slice(first, min(first + num_rows, height))
        yield rows, stored.read(rows)


def split_by_layout(stored: Stored) -> list[Stored]:
    """Split a matrix by rows into matrices that have one layout each."""
    parts = [part for part in _split(stored) if part.shape[0]]
    runs = [list(run) for _, run in groupby(parts, lambda part: part.layout())]
    return [run[0] if len(run) == 1 else StackedRows(run, stored.label) for run in runs]


def _split(stored: Stored, rows: slice = ALL, columns: slice = ALL) -> Iterator[Stored]:
    """Yield the parts of a matrix that are not themselves concatenations."""
    if isinstance(stored, Sliced):
        yield from _split(stored.original, *stored.shift(rows, columns))
    elif isinstance(stored, StackedRows):
        for part, own in stored.list_parts(rows):
            yield from _split(part, own, columns)
    else:
        yield Sliced(stored, rows, columns)


def join_labels(labels: Iterable[str]) -> str:
    """Join labels: file and name of the first tensor, then only the names of the others."""
    first, *others = labels
    return first + "".join(" + " + label.rpartition(" ")[2] for label in others)
