"""Check bounds and values of numbers against the `jsonschema` package, by sign, magnitude and fraction."""

import itertools
import json
import random
from collections.abc import Iterator
from decimal import Decimal

import jsonschema
import pytest

from tests.support.router.json_texts import SchemaGrammar
from tgis.router.grammar.errors import InvalidGrammarError

BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
SMALL = "0 0.001 0.1 0.5 0.25 0.999 1 1.5 2.75 9 9.99 10 10.5 99 99.9 100.001 123.456 1000 999999.5".split()
LARGE = [
    *("1e15", "9007199254740991", "9007199254740992", "9007199254740993", "9007199254740994", "1e16"),
    *("12345678901234567", "123456789012345678", "999999999999999000"),
]
OUTER = ["2147483648", "9223372036854775807", "9223372036854775808", "18446744073709551615", "1e20", "3.4e38"]
STEPS = [Decimal(step) for step in "0 1 0.1 0.01 0.001 0.5 10".split()]


def signed(magnitudes: list[str]) -> list[str]:
    return magnitudes + [f"-{each}" for each in magnitudes if each != "0"]


def spell(value: Decimal) -> str:
    text = f"{value:f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return text if text not in ("", "-", "-0") else "0"


def near(bounds: list[str]) -> Iterator[Decimal]:
    """Return numbers near the bounds."""
    for bound in map(Decimal, bounds):
        yield from (bound + step for step in STEPS)
        yield from (bound - step for step in STEPS)
        yield from (-bound, bound / 10, bound * 10)


def is_valid(schema: str, value: Decimal) -> bool:
    exact = json.loads(schema, parse_float=Decimal, parse_int=Decimal)
    bounds = {key: bound for key, bound in exact.items() if key in BOUNDS}
    return bool(jsonschema.Draft202012Validator(bounds).is_valid(value))


def check(schema: str, bounds: list[str], is_exact: bool) -> None:
    """Check that the grammar accepts no invalid number.

    If the grammar `is_exact`, it must accept every valid one, with or without a trailing 0."""
    grammar, is_integer = SchemaGrammar(schema), '"integer"' in schema
    candidates = {spell(value) for value in near(bounds)}
    candidates = {text for text in candidates if not is_integer or "." not in text}
    valid = {text for text in candidates if is_valid(schema, Decimal(text))}
    if grammar.problem:
        assert "nsatisfiable" in grammar.problem or "empty" in grammar.problem.lower(), grammar.problem
        assert not valid
        return
    assert [text for text in candidates - valid if grammar.takes(text)] == []
    if is_exact:
        zero = "0" if not is_integer else ""
        spellings = {text: {text, text + zero if "." in text else text} for text in valid}
        assert [text for text, ways in spellings.items() if not any(map(grammar.takes, ways))] == []


def write(kind: str, bounds: dict[str, str]) -> str:
    return (
        "{" + ", ".join([f'"type": "{kind}"', *(f'"{key}": {value}' for key, value in bounds.items())]) + "}"
    )


@pytest.mark.parametrize("kind", ["integer", "number"])
@pytest.mark.parametrize("key", BOUNDS)
def test_one_bound(kind: str, key: str) -> None:
    for bound in signed(SMALL):
        check(write(kind, {key: bound}), [bound], is_exact=True)


@pytest.mark.parametrize("kind", ["integer", "number"])
@pytest.mark.parametrize("key", BOUNDS)
def test_large_bounds_are_never_exceeded(kind: str, key: str) -> None:
    for bound in signed(LARGE):
        is_exact = abs(Decimal(bound)) < 2**53 and not (kind == "number" and "clusive" in key)
        check(write(kind, {key: bound}), [bound], is_exact)


@pytest.mark.parametrize("kind", ["integer", "number"])
def test_bounds_beyond_64_bits_are_never_exceeded(kind: str) -> None:
    for bound in OUTER:
        check(write(kind, {"minimum": f"-{bound}", "exclusiveMaximum": bound}), [bound, f"-{bound}"], False)
        grammar = SchemaGrammar(write(kind, {"minimum": f"-{bound}", "maximum": bound}))
        assert all(map(grammar.takes, ("0", "-5", "123456789", "-2147483648")))


def test_several_bounds() -> None:
    r = random.Random(1)
    for _ in range(100):
        keys = r.sample(BOUNDS, r.choice((2, 2, 2, 3, 4)))
        bounds = {key: r.choice(signed(SMALL)) for key in keys}
        check(write(r.choice(("integer", "number")), bounds), list(bounds.values()), is_exact=True)


@pytest.mark.parametrize(
    "bounds",
    [
        {"minimum": "-9.99", "exclusiveMaximum": "-9"},
        {"exclusiveMinimum": "-99.9", "exclusiveMaximum": "-99"},
        {"exclusiveMinimum": "0", "exclusiveMaximum": "0.25"},
        {"exclusiveMinimum": "0", "maximum": "0.001"},
        {"exclusiveMinimum": "3", "maximum": "3.5"},
    ],
)
def test_exclusive_bounds_beside_fractions_of_the_same_integer(bounds: dict[str, str]) -> None:
    check(write("number", bounds), list(bounds.values()), is_exact=True)


@pytest.mark.parametrize("bound", ["1e18", "999999999999999999", "9223372036854775808", "3.4e38"])
def test_numbers_that_cannot_be_required_are_refused(bound: str) -> None:
    for kind, (key, sign) in itertools.product(("integer", "number"), (("minimum", ""), ("maximum", "-"))):
        with pytest.raises(InvalidGrammarError, match="numbers of more than 18 digits cannot be required"):
            SchemaGrammar(write(kind, {key: sign + bound}))


VALUES = [
    "0",
    "-5",
    "9007199254740991",
    "9007199254740992",
    "1e20",
    "0.1",
    "-0.5",
    "1e-7",
    "123456789.123456",
]


@pytest.mark.parametrize("value", VALUES)
def test_values_have_the_right_digits(value: str) -> None:
    for schema in (f'{{"const": {value}}}', f'{{"enum": ["x", {value}]}}'):
        grammar, text = SchemaGrammar(schema), spell(Decimal(value))
        assert grammar.takes(text)
        assert not any(
            grammar.takes(spell(Decimal(value) + step)) for step in map(Decimal, ("1", "-1", "0.5"))
        )


@pytest.mark.parametrize(
    "value", ["9007199254740993", "-9223372036854775808", "-9223372036854775809", "18446744073709551616"]
)
def test_values_that_would_get_other_digits_are_refused(value: str) -> None:
    for schema in (f'{{"const": {value}}}', f'{{"properties": {{"a": {{"enum": [1, {value}]}}}}}}'):
        with pytest.raises(InvalidGrammarError, match=f"the value {value} is not possible"):
            SchemaGrammar(schema)
