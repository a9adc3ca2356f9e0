"""Bounds the structure of JSON bodies before any value is built: the depth and the numbers of lists, objects
and values. Bytes are examined as columns, mostly without the GIL. The cost does not depend on the values."""

import re
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from tgis.router.errors import RequestError
from tgis.router.requests.api_rules import MAX_INPUTS

MAX_DEPTH = 64
MAX_LISTS = 32_768  # maximum number of lists and objects in a body
MAX_VALUES = 262_144  # maximum number of values in a body, without its token ids
FREE_VALUES = 1_024  # fields with at most this many values are not checked
SHORT_LIST = 4_096  # maximum number of values in a field whose own limit is much lower
MAX_TOKENS = 1 << 20  # maximum number of tokens in a request for their text
LEAST_IDS = 65_536  # minimum limit for a list of token ids, because it may be truncated to the model's limit

IDS = ("prompt", "tokens")
SHORT = ("stop", "stop_token_ids", "logit_bias", "adapters", "allowed_token_ids", "bad_words")
TEXTS = "inputs"
CONSTRAINTS = ("response_format", "structured_outputs", "guided_json", "guided_choice", "parameters")

_KEY = re.compile(rb'\s*("(?:[^"\\]|\\.)*")\s*:', re.DOTALL)
_KEPT = b'[]{},"'
_OTHERS = bytes(set(range(256)) - set(_KEPT))
_MARKS = bytes(byte in _KEPT for byte in range(256))
_OPENING, _CLOSING, _COMMA, _QUOTE = b'{},"'
_CASE = np.uint8(0x20)  # turns a list's bracket into an object's, and changes neither commas nor quotes


@dataclass(frozen=True)
class BodyLimits:
    """Limits of the service that bound the structure of a body."""

    max_sequence_length: int = 1 << 20
    max_inputs: int = MAX_INPUTS
    max_guided_bytes: int = 1 << 16

    def of_field(self, name: str, num_lists: int) -> int:
        """Return the maximum number of values in a field with `num_lists` lists."""
        if name == "tokens":  # converted to a text, whose length is not limited
            return MAX_TOKENS
        if name in IDS:
            return num_lists * max(self.max_sequence_length, LEAST_IDS)
        if name in SHORT:
            return SHORT_LIST
        if name == TEXTS:
            return max(SHORT_LIST, 2 * self.max_inputs)
        if name in CONSTRAINTS:  # each value takes at least two bytes
            return max(SHORT_LIST, self.max_guided_bytes // 2)
        return MAX_VALUES


class _Field(NamedTuple):
    name: str
    num_lists: int
    num_values: int


class _Structure(NamedTuple):
    """Brackets, commas and quotes of a body, and a flag for each outside of strings, as columns."""

    codes: NDArray[np.uint8]
    """Codes of the bytes. All brackets are those of objects."""
    is_outside: NDArray[np.bool_]

    @property
    def openings(self) -> NDArray[np.bool_]:
        return self.places_of(_OPENING)

    @property
    def commas(self) -> NDArray[np.bool_]:
        return self.places_of(_COMMA)

    def places_of(self, code: int) -> NDArray[np.bool_]:
        places: NDArray[np.bool_] = (self.codes == code) & self.is_outside
        return places


class Weight(NamedTuple):
    """Cost of building the values of a body."""

    num_lists: int = 0
    num_values: int = 0

    @property
    def is_heavy(self) -> bool:
        return self.num_values > FREE_VALUES


LIGHT = Weight()


def check_structure(body: bytes, limits: BodyLimits, max_depth: int = MAX_DEPTH) -> Weight:
    """Return a body's numbers of lists and values, or zeros for a small body. Raises RequestError."""
    if _is_small(body, max_depth):
        return LIGHT
    plain = body.replace(rb"\\", b"__").replace(rb"\"", b"__") if b"\\" in body else body
    structure = _structure_of(plain)
    num_lists = int(np.count_nonzero(structure.openings))
    num_values = num_lists + int(np.count_nonzero(structure.commas))
    if num_lists > MAX_LISTS:
        raise RequestError(f"the body has more than {MAX_LISTS} lists and objects")
    codes, depths = _walk(structure)
    if depths.max(initial=0) > max_depth:
        raise RequestError(f"the JSON is nested more than {max_depth} levels deep")
    if num_values > FREE_VALUES:
        _check_fields(_large_fields(plain, structure, codes, depths), num_values, limits)
    return Weight(num_lists, num_values)


def _is_small(body: bytes, max_depth: int) -> bool:
    """Return True if a body has few brackets and commas, inside or outside of strings."""
    num_openings = body.count(b"[") + body.count(b"{")
    return num_openings <= max_depth and num_openings + body.count(b",") <= FREE_VALUES


def _structure_of(plain: bytes) -> _Structure:
    """Return the structure of a body without escaped quotes. It is right up to the first JSON error. No value
    after the error is built."""
    codes = np.frombuffer(plain.translate(None, _OTHERS), np.uint8)
    is_inside = np.logical_xor.accumulate(codes == ord('"'))
    return _Structure(codes | _CASE, ~is_inside)


def _walk(structure: _Structure) -> tuple[NDArray[np.uint8], NDArray[np.int32]]:
    """Return the brackets and commas outside of strings, and the depth after each."""
    codes = structure.codes[structure.is_outside & (structure.codes != _QUOTE)]
    steps = (codes == _OPENING).view(np.int8) - (codes == _CLOSING).view(np.int8)
    return codes, steps.cumsum(dtype=np.int32)


def _large_fields(
    plain: bytes, structure: _Structure, codes: NDArray[np.uint8], depths: NDArray[np.int32]
) -> list[_Field]:
    """Return the outermost object's fields that have many values."""
    starts = np.concatenate(([0], np.flatnonzero((depths == 1) & (codes == _COMMA))))
    ends = np.concatenate((starts[1:], [len(codes) - 1]))
    large = np.flatnonzero(ends - starts > FREE_VALUES)
    places = _places(plain, structure)[starts[large]]
    fields = []
    for start, end, place in zip(starts[large], ends[large], places, strict=True):
        inside = codes[start + 1 : end]
        num_lists = int(np.count_nonzero(inside == _OPENING))
        num_values = num_lists + int(np.count_nonzero(inside == _COMMA))
        fields.append(_Field(_key(plain, int(place) + 1), num_lists, num_values))
    return fields


def _places(plain: bytes, structure: _Structure) -> NDArray[np.intp]:
    """Return the positions of the brackets and commas outside of strings."""
    is_kept = np.frombuffer(plain.translate(_MARKS), np.bool_)
    places: NDArray[np.intp] = np.flatnonzero(is_kept)
    is_outside: NDArray[np.bool_] = structure.is_outside & (structure.codes != _QUOTE)
    return places[is_outside]


def _key(body: bytes, place: int) -> str:
    """Return the key at a position, empty if there is none."""
    match = _KEY.match(body, place)
    try:
        return "" if match is None else msgspec.json.decode(match[1], type=str)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""


def _check_fields(fields: list[_Field], num_values: int, limits: BodyLimits) -> None:
    for name, num_lists, num in fields:
        if name in IDS and num_lists > limits.max_inputs + 1:
            raise RequestError(f"{name} must have at most {limits.max_inputs} lists", name)
        if num > (limit := limits.of_field(name, num_lists)):
            named = name if name.isidentifier() and len(name) <= 64 else ""  # not any text of the client
            raise RequestError(f"{named or 'a field'} has more than {limit} values", named)
    if num_values - sum(each.num_values for each in fields if each.name in IDS) > MAX_VALUES:
        raise RequestError(f"the body has more than {MAX_VALUES} values")
