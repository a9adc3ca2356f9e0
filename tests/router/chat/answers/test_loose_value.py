"""Arguments that models write with bare keys and special quotes."""

import json
from typing import Any

import pytest

from tgis.router.chat.answers.loose_value import to_json

QUOTE = '<|"|>'
VALUES: dict[str, Any] = {
    "{}": {},
    '{city:<|"|>New York, "NY"}<|"|>,days:3}': {"city": 'New York, "NY"}', "days": 3},
    "{a:[1,-2.5,true,null],b:{c:[]}}": {"a": [1, -2.5, True, None], "b": {"c": []}},
    '{ "quoted" : <|"|><|"|>, <|"|>x:y<|"|>:false }': {"quoted": "", "x:y": False},
    "{unit:celsius,none:None}": {"unit": "celsius", "none": None},
    "{a:NaN,b:-Infinity,c:[1e999]}": {"a": "NaN", "b": "-Infinity", "c": ["1e999"]},
}
MALFORMED = ["{", "{a}", "{a:1", "{a:1}}", "{a:,}", '{a:<|"|>x}', "{a:1 b:2", '{"a', "{[1]:2}", "{a:" * 999]


def refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


@pytest.mark.parametrize("text", VALUES)
def test_values_become_json(text: str) -> None:
    assert json.loads(to_json(text, QUOTE), parse_constant=refuse) == VALUES[text]


@pytest.mark.parametrize("text", MALFORMED, ids=range(len(MALFORMED)))
def test_malformed_values_stay(text: str) -> None:
    assert to_json(text, QUOTE) == text
