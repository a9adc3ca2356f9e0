"""Ranges of the sampling parameters at their edges, against TGIS's rules as it wrote them down."""

import math
import struct
from collections.abc import Callable
from dataclasses import fields

import pytest

from tgis.sampling_parameters import PARAMETERS, RANGES, Sampling

SMALLEST, LARGEST = struct.unpack("<2f", bytes.fromhex("01000000ffff7f7f"))  # of the wire's floats
EDGES = [0.0, 0.05, 1.0, 2.0, 10.0, 2.0**31 - 1, 2.0**31, LARGEST, SMALLEST]
VALUES = [math.nan, math.inf, -math.inf, *EDGES, *(-edge for edge in EDGES)]
VALUES += [math.nextafter(edge, to) for edge in EDGES for to in (-math.inf, math.inf)]

RULES: dict[str, Callable[[float], bool]] = {
    "temperature": lambda x: 0.05 <= x < math.inf,
    "top_k": lambda x: 0 <= x < 2**31,
    "top_p": lambda x: 0 < x <= 1,
    "typical_p": lambda x: -math.inf < x <= 1,
    "repetition_penalty": lambda x: 0 < x < math.inf,
    "length_penalty_factor": lambda x: 1 <= x <= 10,
    "min_p": lambda x: 0 <= x <= 1,
    "presence_penalty": lambda x: -2 <= x <= 2,
    "frequency_penalty": lambda x: -2 <= x <= 2,
}


@pytest.mark.parametrize("name", RULES)
def test_ranges(name: str) -> None:
    for value in VALUES:
        if name == "top_k" and not value.is_integer():
            continue
        assert RANGES[name].allows(value) == RULES[name](value), value


def test_defaults_are_off_and_allowed() -> None:
    off = {each.name: each.off for each in PARAMETERS}
    declared = {each.name: off[each.name] for each in fields(Sampling) if each.name in off}
    assert vars(Sampling()) == declared | {"logit_bias": ()}
    assert all(RANGES[name].allows(off[name]) for name in RANGES)
    assert RANGES.keys() >= RULES.keys()
