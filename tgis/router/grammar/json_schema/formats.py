"""Formats of strings, which the specification of JSON Schema calls annotations."""

from tgis.router.grammar.json_schema.subschemas import Schema

ENFORCED = frozenset("date-time time date duration email hostname ipv4 ipv6 uuid uri unknown".split())
"""Formats that the grammar library keeps. It refuses schemas with others."""


def leave_out_unknown(schema: Schema) -> bool:
    """Remove a format that is not enforced. Return True if there was one."""
    if schema.get("format", "unknown") in ENFORCED:
        return False
    del schema["format"]
    return True
