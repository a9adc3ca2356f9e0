"""Passes the context of a trace on to the service."""

from collections.abc import Mapping

try:
    from opentelemetry import propagate
except ImportError:  # it is not a dependency
    propagate = None  # type: ignore[assignment]


def trace_metadata(given: Mapping[str, str] | None) -> tuple[tuple[str, str], ...]:
    """Return the fields of the given context, or of OpenTelemetry's current one, as metadata."""
    carrier: dict[str, str] = {}
    if given is not None:
        carrier.update(given)
    elif propagate is not None:
        propagate.inject(carrier)
    return tuple((key.lower(), value) for key, value in carrier.items())
