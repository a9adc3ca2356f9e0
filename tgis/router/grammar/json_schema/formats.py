"""String formats, which are annotations in the JSON Schema specification."""

from tgis.router.grammar.json_schema.subschemas import Schema

ENFORCED = frozenset("date-time time date duration email hostname ipv4 ipv6 uuid uri unknown".split())
"""Formats that the grammar library supports. It rejects schemas with others."""


def remove_unsupported(schema: Schema) -> bool:
    """Remove a format that is not supported. Return True if there was one."""
    if schema.get("format", "unknown") in ENFORCED:
        return False
    del schema["format"]
    return True
