"""Parses the JSON schemas of requests and adapts them to the grammar library."""

import json
from functools import lru_cache
from typing import Any

from llguidance import LLMatcher

from tgis.router.grammar.errors import TOO_DEEP, InvalidGrammarError
from tgis.router.grammar.json_schema.loosening import loosen
from tgis.router.grammar.json_schema.numbers import make_exact
from tgis.router.grammar.json_schema.properties import list_named_properties
from tgis.router.grammar.json_schema.subschemas import Schema, list_subschemas

ENFORCED = frozenset("date-time time date duration email hostname ipv4 ipv6 uuid uri unknown".split())
"""Formats that the grammar library supports. It rejects schemas with others."""
# Usual white space of indented JSON. Without a limit, an uncertain model could generate white space for ever.
WHITESPACE = r"\r?\n[ \t]{0,40}|[ \t]{1,8}"


def read_schema(text: str, is_strict: bool = True) -> str:
    """Return a JSON schema in one line, with `WHITESPACE` unless the schema defines its own. Unsupported
    parts are an error if `is_strict`, and are removed otherwise. Raises InvalidGrammarError."""
    try:
        schema = json.loads(text)
        if not is_strict:
            schema = loosen(schema, is_regex)
        for part in list_subschemas(schema):
            make_exact(part)
            _remove_unsupported(part)
            list_named_properties(part)
        return json.dumps(_guide(schema, is_strict), allow_nan=False)
    except json.JSONDecodeError as error:
        raise InvalidGrammarError(f"{error.msg} at line {error.lineno}, column {error.colno}") from error
    except ValueError as error:
        raise InvalidGrammarError("a number is out of range") from error
    except RecursionError as error:
        raise InvalidGrammarError(TOO_DEEP) from error


def has_unknown_formats(text: str) -> bool:
    """Return True if a JSON schema has unsupported formats, which are removed."""
    return any(_remove_unsupported(part) for part in list_subschemas(json.loads(text)))


def _guide(schema: Any, is_strict: bool) -> Any:
    """Add the library's own settings."""
    if schema is True:
        schema = {}
    if isinstance(schema, dict):
        guidance = schema.setdefault("x-guidance", {"whitespace_pattern": WHITESPACE})
        if isinstance(guidance, dict) and not is_strict:
            guidance["lenient"] = True
    return schema


@lru_cache(256)
def is_regex(pattern: str) -> bool:
    """Return True if the library supports a string pattern."""
    schema = json.dumps({"type": "string", "pattern": pattern})
    return not LLMatcher.validate_grammar(f"start: %json {schema}")


def _remove_unsupported(schema: Schema) -> bool:
    """Remove a format that is not supported. Return True if there was one."""
    if schema.get("format", "unknown") in ENFORCED:
        return False
    del schema["format"]
    return True
