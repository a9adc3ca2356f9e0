"""Reads JSON schemas of requests as the grammar library can keep them."""

import json
from functools import lru_cache
from typing import Any

from llguidance import LLMatcher

from tgis.router.grammar.errors import TOO_DEEP, InvalidGrammarError
from tgis.router.grammar.json_schema.formats import leave_out_unknown
from tgis.router.grammar.json_schema.loosening import loosen
from tgis.router.grammar.json_schema.numbers import make_exact
from tgis.router.grammar.json_schema.properties import list_named_properties
from tgis.router.grammar.json_schema.subschemas import list_subschemas

# White space as people indent. Without a limit, a model that does not know what comes next would write it for
# ever.
WHITESPACE = r"\r?\n[ \t]{0,40}|[ \t]{1,8}"


def read_schema(text: str, is_strict: bool = True) -> str:
    """Return a JSON schema in one line, with `WHITESPACE` unless the schema defines its own. What no grammar
    can be made of is refused only if it `is_strict`, else left out. Raises InvalidGrammarError."""
    try:
        schema = json.loads(text)
        if not is_strict:
            schema = loosen(schema, is_regex)
        for part in list_subschemas(schema):
            make_exact(part)
            leave_out_unknown(part)
            list_named_properties(part)
        return json.dumps(_guide(schema, is_strict), allow_nan=False)
    except json.JSONDecodeError as error:
        raise InvalidGrammarError(f"{error.msg} at line {error.lineno}, column {error.colno}") from error
    except ValueError as error:
        raise InvalidGrammarError("a number is out of range") from error
    except RecursionError as error:
        raise InvalidGrammarError(TOO_DEEP) from error


def has_unknown_formats(text: str) -> bool:
    """Return True if a JSON schema has formats that are left out."""
    return any(leave_out_unknown(part) for part in list_subschemas(json.loads(text)))


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
    """Return True for a pattern of strings that the library can keep."""
    schema = json.dumps({"type": "string", "pattern": pattern})
    return not LLMatcher.validate_grammar(f"start: %json {schema}")
