"""Draws lengths in tokens from a distribution that is given as a text."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from tgis.load.errors import LoadError

FORMS = "N, LOW-HIGH, normal:MEAN:DEVIATION, lognormal:MEDIAN:SIGMA or N:SHARE,N:SHARE,..."


@dataclass(frozen=True)
class Lengths:
    """Distribution of lengths."""

    text: str
    draw: Callable[[random.Random], int]


def parse_lengths(text: str) -> Lengths:
    """Return the distribution. Raises LoadError."""
    try:
        return Lengths(text, _parse(text.strip()))
    except (ValueError, ZeroDivisionError) as error:
        raise LoadError(f"{text!r} is not a distribution of lengths: {FORMS}") from error


def _parse(text: str) -> Callable[[random.Random], int]:
    name, _, rest = text.partition(":")
    if name in ("normal", "lognormal"):
        centre, spread = (_positive(part) for part in rest.split(":"))
        if name == "normal":
            return lambda source: max(1, round(source.gauss(centre, spread)))
        return lambda source: max(1, round(source.lognormvariate(math.log(centre), spread)))
    if ":" in text:
        pairs = [part.split(":") for part in text.split(",")]
        values = [_whole(value) for value, _ in pairs]
        weights = [_positive(weight) for _, weight in pairs]
        return lambda source: source.choices(values, weights)[0]
    if "-" in text:
        low, high = (_whole(part) for part in text.split("-"))
        if low > high:
            raise ValueError("the range is empty")
        return lambda source: source.randint(low, high)
    fixed = _whole(text)
    return lambda source: fixed


def _whole(text: str) -> int:
    if (value := int(text)) < 1:
        raise ValueError("a length is at least 1")
    return value


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise ValueError("a positive number is needed")
    return value
