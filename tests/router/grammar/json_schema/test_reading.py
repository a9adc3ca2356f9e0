"""Check schemas that the grammar library refuses or misreads: formats, name patterns and parts that are not
strict.

They are compared with the `jsonschema` package and with pydantic's own schemas."""

import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher
from pydantic import BaseModel, DirectoryPath, FilePath, SecretBytes, SecretStr

from tests.support.router.json_texts import SchemaGrammar
from tgis.router.grammar.json_schema.reading import ENFORCED, has_unknown_formats, read_schema

OFFICIAL = (
    *("date-time", "date", "time", "duration", "email", "idn-email", "hostname", "idn-hostname", "ipv4"),
    *("ipv6", "uri", "uri-reference", "iri", "iri-reference", "uuid", "uri-template", "json-pointer"),
    *("relative-json-pointer", "regex"),
)
USUAL = ("password", "byte", "binary", "path", "file-path", "directory-path", "int32", "double", "phone", "x")


@pytest.mark.parametrize("name", [*OFFICIAL, *USUAL])
def test_formats_are_kept_where_known_and_else_ignored(name: str) -> None:
    """Check formats that the library does not know, and so refuses; its next release may know others."""
    schema = {"type": "string", "format": name}
    is_known = not LLMatcher.validate_grammar(f"start: %json {json.dumps(schema)}")
    assert is_known == (name in ENFORCED)
    grammar = SchemaGrammar(schema)
    assert not grammar.problem
    assert grammar.takes('"any text"') != is_known
    assert has_unknown_formats(json.dumps({"items": [{"properties": {"format": schema}}]})) != is_known


class Account(BaseModel):
    name: str
    password: SecretStr
    token: SecretBytes
    home: Path
    file: FilePath
    folder: DirectoryPath
    blob: bytes


def test_pydantics_schemas_are_served() -> None:
    grammar = SchemaGrammar(Account.model_json_schema())
    values = dict.fromkeys(Account.model_fields, "x")
    assert grammar.takes(json.dumps(values))
    assert not grammar.takes(json.dumps({**values, "home": 1}))


def test_a_property_may_be_called_format() -> None:
    schema = {"type": "object", "properties": {"format": {"const": "a"}, "const": {"type": "integer"}}}
    assert SchemaGrammar(schema).takes('{"format": "a", "const": 9007199254740993}')


PATTERNS = ("^a", "a$", "^ab$", "^a.*b$", "^[ab]", "^x_", ".*", "^$", "^(a|b)$", "^(?:ab|x_1)$", "b")
NAMES = ("a", "ab", "b", "x_1", "abb", "c", "")
KINDS: tuple[Any, ...] = (
    {"type": "string"},
    {"type": "integer"},
    {"type": "boolean"},
    {},
    {"enum": [1, "q"]},
)


def test_patterns_of_names_never_lead_nowhere() -> None:
    """Check schemas in which all names that match a pattern are listed or required, too."""
    r, num_checked = random.Random(3), 0
    for _ in range(150):
        schema: dict[str, Any] = {
            "type": "object",
            "properties": {name: r.choice(KINDS) for name in r.sample(NAMES, r.randint(0, 3))},
            "patternProperties": {r.choice(PATTERNS): r.choice(KINDS)},
        }
        if r.random() < 0.5:
            schema["additionalProperties"] = r.choice((False, {"type": "integer"}, True))
        if r.random() < 0.4:
            schema["required"] = r.sample(NAMES, r.randint(1, 2))
        grammar = SchemaGrammar(schema)
        if grammar.problem:
            assert "nsatisfiable" in grammar.problem
            continue
        text = grammar.walk(r, b'ab{}":,1qx_')
        if text is not None:
            jsonschema.validate(json.loads(text), schema)
            num_checked += 1
    assert num_checked > 40


@pytest.mark.parametrize(
    ("part", "right", "wrong"),
    [
        ({"type": "string", "pattern": "(?=a)b"}, '"zz"', "1"),
        ({"type": "string", "pattern": r"\bx"}, '"zz"', "1"),
        ({"type": "string", "pattern": r"(a)\1", "maxLength": 2}, '"zz"', '"zzz"'),
        ({"type": "string", "pattern": "(a"}, '"zz"', "1"),
        ({"$ref": "http://127.0.0.1:9/x"}, "[1]", "x"),
        ({"$ref": "#/$defs/none", "type": "integer"}, "1", '"x"'),
        ({"type": "object", "required": None}, "{}", "1"),
        ({"type": "any"}, "[]", "x"),
        ({"type": ["string", "any"]}, '"x"', "1"),
        ({"type": "string", "minLength": -1}, '""', "1"),
        ({"type": "integer", "minimum": 1e20, "maximum": 5}, "5", "6"),
        ({"const": 2**64}, "5", "x"),
        ({"type": "object", "patternProperties": {"(?=a)": {}, "b": {"type": "integer"}}}, '{"b": "x"}', "1"),
        ({"anyOf": []}, "5", "x"),
        ({"properties": {"b": 7}, "type": "object"}, '{"b": 1}', "1"),
        ({"not": {"type": "string"}, "type": "integer"}, "1", '"x"'),
        ({"type": "array", "uniqueItems": True, "items": {"type": "integer"}}, "[1, 1]", '["x"]'),
        (7, "[]", "x"),
    ],
)
def test_only_the_wrong_part_of_a_schema_that_is_not_strict_is_lost(
    part: Any, right: str, wrong: str
) -> None:
    schema = {
        "type": "object",
        "properties": {"a": part, "n": {"type": "integer"}},
        "required": ["a", "n"],
        "additionalProperties": False,
    }
    grammar = SchemaGrammar(read_schema(json.dumps(schema), is_strict=False))
    assert not grammar.problem
    assert grammar.takes(f'{{"a": {right}, "n": 1}}')
    assert not grammar.takes(f'{{"a": {wrong}, "n": 1}}')
    assert not grammar.takes(f'{{"a": {right}, "n": "x"}}')
    assert not grammar.takes(f'{{"a": {right}}}')


def test_references_into_the_schema_stay() -> None:
    schema = {
        "$defs": {"a/b": {"type": "integer"}, "n": {"$ref": "#/$defs/a~1b"}},
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/n"}, "b": {"$ref": "#/properties/a"}},
        "additionalProperties": False,
    }
    grammar = SchemaGrammar(read_schema(json.dumps(schema), is_strict=False))
    assert grammar.takes('{"a": 1, "b": 2}')
    assert not grammar.takes('{"a": "x"}')
