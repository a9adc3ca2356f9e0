"""Conversion of a checkpoint's tensors to those of a GGUF file, one matrix at a time."""

from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray

from tgis.convert.gguf.tensor_targets import GgufTarget
from tgis.shard.checkpoint.files import Checkpoint
from tgis.shard.checkpoint.tensors import FileTensor, WeightsError
from tgis.shard.quantize.packing import check_weight

Floats = NDArray[np.float32]

# Matrices that get 8 bits: they are read rarely, and many outputs depend on them.
_TABLES = ("token_embd.weight", "output.weight")
# Matrices that llama.cpp stores as floats.
_WIDE = ("ffn_gate_inp.weight", "position_embd.weight")
_PIECE_BYTES = 64 << 20  # float32 values rounded at once


@dataclass(frozen=True)
class PlannedTensor:
    """Tensor of a GGUF file. `read` yields its matrices, or the vector."""

    name: str
    shape: tuple[int, ...]
    type: Type
    read: Callable[[], Iterator[Floats]]

    @property
    def num_bytes(self) -> int:
        block_elements, block_bytes = gguf.GGML_QUANT_SIZES[self.type]
        return prod(self.shape) // block_elements * block_bytes

    @property
    def padded_bytes(self) -> int:
        return -(-self.num_bytes // gguf.GGUF_DEFAULT_ALIGNMENT) * gguf.GGUF_DEFAULT_ALIGNMENT

    def write(self, file: BinaryIO) -> None:
        """Write the elements, rounded like llama.cpp's reference, and the padding after them."""
        for matrix in self.read():
            rows = matrix.reshape(-1, matrix.shape[-1])
            step = max(1, _PIECE_BYTES // (4 * rows.shape[1]))
            for first in range(0, len(rows), step):
                piece = np.ascontiguousarray(rows[first : first + step])
                file.write(gguf.quantize(piece, self.type).tobytes())
        file.write(bytes(self.padded_bytes - self.num_bytes))


class SpelledCheckpoint(Container[str]):
    """Tensors of a directory. Names may have a prefix that the checkpoint omits."""

    def __init__(self, directory: Path, prefix: str):
        self._checkpoint = Checkpoint(directory)
        self._prefix = prefix
        self.list_unread = self._checkpoint.list_unread

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._spell(name) in self._checkpoint

    def fetch(self, name: str) -> FileTensor:
        """Return a tensor without reading its elements. Raises WeightsError."""
        return self._checkpoint.fetch(self._spell(name))

    def _spell(self, name: str) -> str:
        return name if name in self._checkpoint else name.removeprefix(self._prefix)


def plan_tensor(checkpoint: SpelledCheckpoint, target: GgufTarget, codes: Type) -> PlannedTensor:
    """Plan a tensor. Its matrices get the type `codes` if their shapes permit it. Raises WeightsError."""
    sources = [checkpoint.fetch(name) for name in target.sources]
    shape = sources[0].shape
    if any(source.shape != shape for source in sources):
        raise WeightsError(f"{sources[0].label} and the other experts have different shapes")
    if target.storage.is_transposed:
        shape = shape[::-1]
    axis = len(shape) - 2 if len(shape) > 1 else 0
    if shape[axis] % target.count:
        raise WeightsError(f"{sources[0].label} has shape {list(shape)}, not {target.count} equal parts")
    part = (*shape[:axis], shape[axis] // target.count, *shape[axis + 1 :])
    whole = (len(sources), *part) if len(sources) > 1 else part

    def read() -> Iterator[Floats]:
        for source in sources:
            yield _rearrange(source, target, axis)

    return PlannedTensor(target.name, whole, _choose_type(target.name, part, codes), read)


def _choose_type(name: str, shape: tuple[int, ...], codes: Type) -> Type:
    if len(shape) == 1 or name.endswith(_WIDE):
        return Type.F32
    if shape[-1] % gguf.GGML_QUANT_SIZES[codes][0]:
        return Type.F16
    return Type.Q8_0 if name in _TABLES else codes


def _rearrange(source: FileTensor, target: GgufTarget, axis: int) -> Floats:
    """Return the elements in the file's order."""
    weight = source.read().float()
    storage = target.storage
    check_weight(weight, source.label)
    elements: Floats = weight.numpy()
    if storage.is_transposed:
        elements = elements.T
    if storage.order is not None:
        elements = elements[np.argsort(storage.order.index(len(elements)))]
    elements = np.split(elements, target.count, axis)[target.number]
    return elements + np.float32(storage.added) if storage.added else elements
