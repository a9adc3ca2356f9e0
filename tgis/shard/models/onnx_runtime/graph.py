"""What goes in and out of the graph in an ONNX file, read from its header: neither weights nor ONNX Runtime
are loaded."""

import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from tgis.shard.checkpoint.tensors import WeightsError, first_line

# Types of fields in protobuf's encoding, and how long the values of fixed length are.
VARINT, BYTES = 0, 2
FIXED = {1: 8, 5: 4}
# Numbers that ONNX's schema gives its fields.
MODEL_GRAPH = 7
GRAPH_INPUT, GRAPH_OUTPUT = 11, 12
VALUE_NAME, VALUE_TYPE = 1, 2
TYPE_TENSOR = 1
TENSOR_ELEMENT, TENSOR_SHAPE = 1, 2
SHAPE_DIMENSION = 1
DIMENSION_SIZE = 1
# And the types of elements that language models take and give.
ELEMENTS = {1: torch.float32, 6: torch.int32, 7: torch.int64, 9: torch.bool, 10: torch.float16}

Field = int | memoryview


@dataclass(frozen=True)
class Value:
    """A tensor that goes in or out; None stands for a type that is none of ours and for sizes left open."""

    dtype: torch.dtype | None
    shape: tuple[int | None, ...]


@dataclass(frozen=True)
class Graph:
    inputs: dict[str, Value]
    outputs: dict[str, Value]


def read_graph(file: Path) -> Graph:
    """Raises WeightsError where the file is none of ONNX."""
    try:
        with file.open("rb") as opened:
            # Unmapped once nothing looks into it any more.
            model = memoryview(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ))
        parts = list(_fields(_last(model, MODEL_GRAPH)))
        inputs, outputs = (
            dict(_value(part) for number, part in parts if number == kind)
            for kind in (GRAPH_INPUT, GRAPH_OUTPUT)
        )
    except (OSError, ValueError, IndexError) as error:
        raise WeightsError(f"{file} cannot be read as ONNX: {first_line(error)}") from error
    return Graph(inputs, outputs)


def _value(message: Field) -> tuple[str, Value]:
    tensor = _last(_last(message, VALUE_TYPE), TYPE_TENSOR)
    element = _last(tensor, TENSOR_ELEMENT)
    dimensions = [part for number, part in _fields(_last(tensor, TENSOR_SHAPE)) if number == SHAPE_DIMENSION]
    name = _last(message, VALUE_NAME)
    if not isinstance(element, int) or not isinstance(name, memoryview):
        raise ValueError("an input or output is not as its schema says")
    return str(name, "utf-8"), Value(ELEMENTS.get(element), tuple(map(_size, dimensions)))


def _size(dimension: Field) -> int | None:
    sizes = [part for number, part in _fields(dimension) if number == DIMENSION_SIZE]
    return sizes[-1] if sizes and isinstance(sizes[-1], int) and sizes[-1] < 1 << 63 else None


def _last(message: Field, number: int) -> Field:
    """A field that is there once; protobuf lets the last one count. Raises ValueError where it is absent."""
    found = [part for one, part in _fields(message) if one == number]
    if not found:
        raise ValueError(f"field {number} is missing")
    return found[-1]


def _fields(message: Field) -> Iterator[tuple[int, Field]]:
    """Numbers and contents of a message's fields; a nested message is a view of its bytes."""
    if isinstance(message, int):
        raise ValueError("there is a number in place of a message")
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        number, kind = key >> 3, key & 7
        if kind == VARINT:
            content, at = _varint(message, at)
            yield number, content
            continue
        if kind == BYTES:
            size, at = _varint(message, at)
        elif kind in FIXED:
            size = FIXED[kind]
        else:
            raise ValueError("a field is of no known type")
        if at + size > len(message):
            raise ValueError("it ends too early")
        yield number, message[at : at + size]
        at += size


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    """A number, and where it ends. Raises IndexError where the message ends before it."""
    number, shift = 0, 0
    while True:
        byte = message[at]
        number |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return number, at
