"""Writes the grammar of arguments whose notation is not JSON: `q="x", n=1` or `q:<|"|>x<|"|>,n:1`."""

import json
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from tgis.router.grammar.answer_rules import Notation
from tgis.router.grammar.errors import InvalidGrammarError
from tgis.router.grammar.json_schema.reading import read_schema
from tgis.router.grammar.parameters import allows_any

_DEFINITIONS = ("$defs", "definitions")
_ANNOTATIONS = {"title", "description", "default", "examples", "deprecated", "$comment", *_DEFINITIONS}
_KEY = r"NOTATION_KEY: /[A-Za-z_][A-Za-z0-9_\-]*/"
_NUMBER = '%json {"type": "number"}'


UNWRITABLE_NAME = "the model's notation of calls cannot write the name of a property"
# Names that parsers read, by the text between a key and its value.
_NAMES = {
    "=": re.compile(r"[^\s=,()\[\]{}\"']([^=,()\[\]{}\"']*[^\s=,()\[\]{}\"'])?"),
    ":": re.compile(r"[^\s,:\[\]{}\"<]([^,:\[\]{}<]*[^\s,:\[\]{}<])?"),
}


class _Member(NamedTuple):
    grammar: str
    is_required: bool


class NotationWriter:
    """Writer of the arguments of one function. Values whose schema this notation does not cover are JSON,
    which parsers of the notation also read."""

    def __init__(
        self,
        notation: Notation,
        prefix: str,
        is_strict: bool,
        add_line: Callable[[str], None],
        text_grammar: str | None,
        quote_literal: Callable[[str], str] | None,
    ) -> None:
        """Create a writer. `prefix` begins the names of its rules. `text_grammar` is that of any text with
        its quotes, and `quote_literal` returns that of one text; None if texts are JSON."""
        self._notation = notation
        self._prefix = prefix
        self._is_strict = is_strict
        self._add_line = add_line
        self._text = text_grammar
        self._quote_literal = quote_literal
        self._shared: dict[str, Any] = {}
        self._num_objects = 0

    def arguments(self, schema_text: str) -> str:
        """Return the grammar of the arguments. Raises InvalidGrammarError."""
        read_schema(schema_text, self._is_strict)
        schema = json.loads(schema_text)
        if allows_any(schema_text):
            self._add_any()
            return "any_members?"
        self._shared = {key: schema[key] for key in _DEFINITIONS if key in schema}
        return self._members(schema)

    def _members(self, schema: dict[str, Any]) -> str:
        """Return the grammar of an object's members, in the order of the schema."""
        required = schema.get("required")
        names = required if isinstance(required, list) else []
        properties = schema.get("properties")
        if not all(map(_NAMES[self._notation.key_end].fullmatch, properties or ())):
            raise InvalidGrammarError(UNWRITABLE_NAME)
        members = [
            _Member(f"{json.dumps(name + self._notation.key_end)} {self._value(part)}", name in names)
            for name, part in (properties.items() if isinstance(properties, dict) else ())
        ]
        return self._join(members)

    def _join(self, members: list[_Member]) -> str:
        """Return the grammar of members with separators. Rules keep its size linear."""
        name = f"{self._prefix}_{self._num_objects}"
        self._num_objects += 1
        separator = json.dumps(self._notation.separator)
        rest, all_rest = '""', '""'
        for i, member in reversed([*enumerate(members)]):
            self._add_line(f"{name}_member_{i}: {member.grammar}")
            self._add_line(f"{name}_rest_{i}: {rest}")
            sign = "" if member.is_required else "?"
            first = f"{name}_member_{i} {name}_rest_{i}"
            all_rest = first if member.is_required else f"({first} | {name}_first_{i + 1})"
            rest = f"({separator} {name}_member_{i}){sign} {name}_rest_{i}"
            self._add_line(f"{name}_first_{i}: {all_rest}")
        self._add_line(f'{name}_first_{len(members)}: ""')
        return f"{name}_first_0"

    def _value(self, schema: Any) -> str:
        """Return the grammar of a value."""
        if schema is True or (isinstance(schema, dict) and not schema.keys() - _ANNOTATIONS):
            self._add_any()
            return "any_value"
        if not isinstance(schema, dict):
            return self._json(schema)
        keys = schema.keys() - _ANNOTATIONS
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(values, list) and values and keys <= {"const", "enum", "type"}:
            return f"({' | '.join(map(self._literal, values))})"
        return self._typed(schema, keys) or self._json(schema)

    def _typed(self, schema: dict[str, Any], keys: set[str]) -> str:
        """Return the grammar of a value with a type; empty if the notation does not cover the schema."""
        true, false, null = self._notation.constants
        match schema.get("type"):
            case "boolean" if keys == {"type"}:
                return f"({_any_of((true, false))})"
            case "null" if keys == {"type"}:
                return json.dumps(null)
            case "string" if keys == {"type"} and self._text is not None:
                return self._text
            case "array" if keys <= {"type", "items"} and self._text is not None:
                item = self._value(schema.get("items", True))
                return f'"[" ({item} ({json.dumps(self._notation.separator)} {item})*)? "]"'
            case "object" if keys <= {"type", "properties", "required", "additionalProperties"}:
                return self._object(schema) if self._text is not None else ""
        return ""

    def _object(self, schema: dict[str, Any]) -> str:
        if schema.get("properties"):
            return f'"{{" {self._members(schema)} "}}"'
        if schema.get("additionalProperties", True) is not True:
            return '"{" "}"' if schema["additionalProperties"] is False else ""
        self._add_any()
        return '"{" any_members? "}"'

    def _literal(self, value: Any) -> str:
        """Return the grammar of one value."""
        true, false, null = self._notation.constants
        if value is None or isinstance(value, bool):
            return json.dumps(null if value is None else true if value else false)
        if isinstance(value, str) and self._quote_literal is not None:
            return self._quote_literal(value)
        if isinstance(value, str | int):
            return json.dumps(json.dumps(value, ensure_ascii=False))
        return self._json({"const": value})

    def _json(self, schema: Any) -> str:
        shared = self._shared if isinstance(schema, dict) else {}
        full = shared | schema if isinstance(schema, dict) else schema
        return f"%json {read_schema(json.dumps(full), self._is_strict)}"

    def _add_any(self) -> None:
        """Write the rules of any value."""
        constants = _any_of(self._notation.constants)
        separator = json.dumps(self._notation.separator)
        member = f"NOTATION_KEY {json.dumps(self._notation.key_end)} any_value"
        self._add_line(_KEY)
        self._add_line(f"any_members: {member} ({separator} {member})*")
        if self._text is None:
            self._add_line(f"any_value: {constants} | %json {read_schema('{}', is_strict=True)}")
            return
        self._add_line(f"any_value: {self._text} | {_NUMBER} | {constants} | any_list | any_object")
        self._add_line(f'any_list: "[" (any_value ({separator} any_value)*)? "]"')
        self._add_line('any_object: "{" any_members? "}"')


def _any_of(texts: Iterable[str]) -> str:
    return " | ".join(map(json.dumps, texts))
