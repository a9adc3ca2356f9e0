"""Removes from a JSON schema that is not strict the parts that a grammar cannot express."""

from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote

from tgis.router.grammar.errors import InvalidGrammarError
from tgis.router.grammar.json_schema.numbers import make_exact
from tgis.router.grammar.json_schema.subschemas import Schema, list_subschemas

TYPES = frozenset("array boolean integer null number object string".split())


def loosen(schema: Any, is_regex: Callable[[str], bool]) -> Any:
    """Return the schema without keywords with invalid values, unsupported regexes and dangling references.
    The schema may be modified in place."""
    if not isinstance(schema, dict | bool):
        return {}
    for part in list_subschemas(schema):
        _drop_wrong_values(part)
        _drop_regexes(part, is_regex)
        _drop_numbers(part)
        if not _is_resolvable(schema, part.get("$ref")):
            del part["$ref"]
    return schema


def _drop_wrong_values(schema: Schema) -> None:
    if isinstance(types := schema.get("type"), list):
        schema["type"] = [each for each in types if each in TYPES]
    for key, is_valid in _IS_VALID.items():
        if key in schema and not is_valid(schema[key]):
            del schema[key]
    for key in ("properties", "patternProperties", "$defs", "definitions"):
        for name, value in schema.get(key, {}).items():
            schema[key][name] = value if _is_schema(value) else True


def _drop_regexes(schema: Schema, is_regex: Callable[[str], bool]) -> None:
    if "pattern" in schema and not is_regex(schema["pattern"]):
        del schema["pattern"]
    patterns = schema.get("patternProperties", {})
    if not all(map(is_regex, patterns)):
        # Without a valid pattern, it is unknown which properties are additional.
        del schema["patternProperties"]
        schema.pop("additionalProperties", None)


def _drop_numbers(schema: Schema) -> None:
    """Remove values and bounds that the library cannot represent."""
    for keys in (("const",), ("enum",), ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        kept = {key: schema[key] for key in (*keys, "type") if key in schema}
        try:
            make_exact(dict(kept))
        except InvalidGrammarError:
            for key in keys:
                schema.pop(key, None)


def _is_resolvable(root: Any, reference: object) -> bool:
    """Return True for a pointer into the schema itself, and for no reference."""
    if reference is None:
        return True
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return False
    target = root
    for part in reference.split("/")[1:]:
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(target, list) and name.isdecimal() and int(name) < len(target):
            target = target[int(name)]
        elif isinstance(target, dict) and name in target:
            target = target[name]
        else:
            return False
    return _is_schema(target)


def _is_schema(value: object) -> bool:
    return isinstance(value, dict | bool)


def _are_schemas(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_schema, value))


def _is_map(value: object) -> bool:
    return isinstance(value, dict)


def _is_type(value: object) -> bool:
    return value in TYPES if isinstance(value, str) else isinstance(value, list) and bool(value)


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _are_values(value: object) -> bool:
    return isinstance(value, list) and bool(value)


_IS_VALID: Mapping[str, Callable[[object], bool]] = {
    "type": _is_type,
    "required": _are_texts,
    "enum": _are_values,
    "pattern": _is_text,
    "format": _is_text,
    "multipleOf": _is_positive,
    "items": lambda value: _is_schema(value) or _are_schemas(value),
    **dict.fromkeys(("properties", "patternProperties", "$defs", "definitions"), _is_map),
    **dict.fromkeys(("additionalProperties", "additionalItems"), _is_schema),
    **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems"), _are_schemas),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), _is_number),
    **dict.fromkeys(
        ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"), _is_count
    ),
}
