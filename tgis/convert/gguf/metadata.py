"""Reads values of a GGUF file's metadata, with one-line errors for missing and invalid values."""

from array import array
from collections.abc import Mapping
from math import isfinite
from pathlib import Path

from tgis.convert.atomic_write import ConversionError
from tgis.tensor_files.gguf_header import Value

ARCHITECTURE = "general.architecture"
MAX_SHOWN_CHARS = 60  # of a value
MAX_REASON_CHARS = 200  # of a library's error, which may quote a value


class Metadata:
    """Metadata of a file. A key that begins with a dot is prefixed with the file's architecture."""

    def __init__(self, path: Path, values: Mapping[str, Value]) -> None:
        self.path = path
        self._values = values

    @property
    def architecture(self) -> str:
        return self.text(ARCHITECTURE)

    def __contains__(self, key: str) -> bool:
        return self._full(key) in self._values

    def integer(self, key: str, default: int | None = None) -> int:
        """Return a non-negative integer. Raises ConversionError."""
        value = self._find(key, default)
        if isinstance(value, array) and len({*value}) == 1:  # one value for each layer, all of them equal
            value = value[0]
        if type(value) is not int or value < 0:
            raise self.refuse(key, f"is {show(value)}, not a number")
        return value

    def layer_integers(self, key: str, count: int) -> list[int]:
        """Return a non-negative integer for each of `count` layers, which may have one in common. Raises
        ConversionError."""
        value = self._find(key, None)
        numbers = [*value] if isinstance(value, array) else [value] * count
        integers = [each for each in numbers if type(each) is int and each >= 0]
        if len(numbers) != count or len(integers) != count:
            raise self.refuse(key, f"is {show(value)}, not one number for each of {count} layers")
        return integers

    def number(self, key: str, default: float | None = None) -> float:
        """Return a positive number. Raises ConversionError."""
        value = self._find(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.refuse(key, f"is {show(value)}, not a number")
        if not (isfinite(value) and value > 0):
            raise self.refuse(key, f"is {value}, not a positive number")
        return float(value)

    def text(self, key: str, default: str | None = None) -> str:
        value = self._find(key, default)
        if not isinstance(value, str):
            raise self.refuse(key, f"is {show(value)}, not a text")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._find(key, default)
        if not isinstance(value, bool):
            raise self.refuse(key, f"is {show(value)}, not a truth value")
        return value

    def texts(self, key: str) -> list[str]:
        value = self._find(key, None)
        if not isinstance(value, list):
            raise self.refuse(key, "is not an array of texts")
        return value

    def integers(self, key: str) -> list[int]:
        value = self._find(key, None)
        if not isinstance(value, array) or value.typecode in "fd":
            raise self.refuse(key, "is not an array of integers")
        return [int(each) for each in value]

    def numbers(self, key: str) -> list[float]:
        value = self._find(key, None)
        if not isinstance(value, array) or value.typecode not in "fd":
            raise self.refuse(key, "is not an array of numbers")
        return [float(each) for each in value]

    def token_id(self, key: str) -> int | None:
        """Return the id of a token, or None if there is none. Raises ConversionError."""
        return self.integer(key) if key in self else None

    def refuse(self, key: str, problem: str) -> ConversionError:
        return ConversionError(f"{self.path}: {self._full(key)} {problem}")

    def _find(self, key: str, default: "Value | None") -> Value:
        value = self._values.get(self._full(key), default)
        if value is None:
            raise self.refuse(key, "is missing")
        return value

    def _full(self, key: str) -> str:
        return f"{self.architecture}{key}" if key.startswith(".") else key


def show(value: Value) -> str:
    """Return a value's text for an error; a long text is shortened."""
    kinds = {bool: "a truth value", list: "an array of texts", array: "an array"}
    return kinds.get(type(value)) or cut(repr(value), MAX_SHOWN_CHARS)


def cut(text: str, max_chars: int = MAX_REASON_CHARS) -> str:
    return text if len(text) <= max_chars else f"{text[:max_chars]}..."
