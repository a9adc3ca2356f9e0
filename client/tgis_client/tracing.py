"""Passes the context of a trace on to the service."""

import sys
from collections.abc import Mapping


def trace_metadata(given: Mapping[str, str] | None) -> tuple[tuple[str, str], ...]:
    """Return the fields of the given context, or of OpenTelemetry's current one, as metadata."""
    carrier = _current() if given is None else given
    return tuple((key.lower(), value) for key, value in carrier.items())


def _current() -> dict[str, str]:
    """Return the fields of the current span. A program without OpenTelemetry has none, and does not import it."""
    carrier: dict[str, str] = {}
    if "opentelemetry.trace" in sys.modules:
        from opentelemetry import propagate

        propagate.inject(carrier)
    return carrier
