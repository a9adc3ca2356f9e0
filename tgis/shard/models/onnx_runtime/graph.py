"""Reads the inputs and outputs of an ONNX file's graph, without loading weights or ONNX Runtime."""

import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from tgis.errors import first_line
from tgis.shard.checkpoint.tensors import WeightsError

# Wire types of protobuf, and the sizes in bytes of those with a fixed size.
VARINT, BYTES = 0, 2
FIXED = {1: 8, 5: 4}
# Field numbers of ONNX's schema.
MODEL_GRAPH = 7
GRAPH_INPUT, GRAPH_OUTPUT = 11, 12
VALUE_NAME, VALUE_TYPE = 1, 2
TYPE_TENSOR = 1
TENSOR_ELEMENT, TENSOR_SHAPE = 1, 2
SHAPE_DIMENSION = 1
DIMENSION_SIZE = 1
# Element types of inputs and outputs of language models, by their numbers in the schema.
ELEMENTS = {1: torch.float32, 6: torch.int32, 7: torch.int64, 9: torch.bool, 10: torch.float16}

Field = int | memoryview


@dataclass(frozen=True)
class OnnxValue:
    """Input or output tensor. None means an unsupported type or a dynamic size."""

    dtype: torch.dtype | None
    shape: tuple[int | None, ...]


@dataclass(frozen=True)
class OnnxGraph:
    inputs: dict[str, OnnxValue]
    outputs: dict[str, OnnxValue]


def read_graph(file: Path) -> OnnxGraph:
    """Read the graph of a file. Raises WeightsError if the file is not ONNX."""
    try:
        with file.open("rb") as opened:
            # The last view of the file unmaps it.
            model = memoryview(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ))
        parts = list(_fields(_last(model, MODEL_GRAPH)))
        inputs, outputs = (
            dict(_value(part) for number, part in parts if number == kind)
            for kind in (GRAPH_INPUT, GRAPH_OUTPUT)
        )
    except (OSError, ValueError, IndexError) as error:
        raise WeightsError(f"{file} cannot be read as ONNX: {first_line(error)}") from error
    return OnnxGraph(inputs, outputs)


def _value(message: Field) -> tuple[str, OnnxValue]:
    tensor = _last(_last(message, VALUE_TYPE), TYPE_TENSOR)
    element = _last(tensor, TENSOR_ELEMENT)
    dimensions = [part for number, part in _fields(_last(tensor, TENSOR_SHAPE)) if number == SHAPE_DIMENSION]
    name = _last(message, VALUE_NAME)
    if not isinstance(element, int) or not isinstance(name, memoryview):
        raise ValueError("an input or output does not follow the schema")
    return str(name, "utf-8"), OnnxValue(ELEMENTS.get(element), tuple(map(_size, dimensions)))


def _size(dimension: Field) -> int | None:
    sizes = [part for number, part in _fields(dimension) if number == DIMENSION_SIZE]
    return sizes[-1] if sizes and isinstance(sizes[-1], int) and sizes[-1] < 1 << 63 else None


def _last(message: Field, number: int) -> Field:
    """Return the last occurrence of a field, as protobuf does."""
    contents = [part for one, part in _fields(message) if one == number]
    if not contents:
        raise ValueError(f"field {number} is missing")
    return contents[-1]


def _fields(message: Field) -> Iterator[tuple[int, Field]]:
    """Yield the number and the content of each field of a message."""
    if isinstance(message, int):
        raise ValueError("a message was expected, not a number")
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        number = key >> 3
        kind = key & 7
        if kind == VARINT:
            content, at = _varint(message, at)
            yield number, content
            continue
        if kind == BYTES:
            size, at = _varint(message, at)
        elif kind in FIXED:
            size = FIXED[kind]
        else:
            raise ValueError("a field has an unknown type")
        if at + size > len(message):
            raise ValueError("the file is truncated")
        yield number, message[at : at + size]
        at += size


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    """Return a variable-length integer and the offset of its end."""
    number, shift = 0, 0
    while True:
        byte = message[at]
        number |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return number, at
