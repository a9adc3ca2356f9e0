"""Reads what a text must match."""

from tgis.router.api.http.openai.sampling_fields import SamplingFields
from tgis.router.grammar.compiler import Guided


def read_guided(fields: SamplingFields) -> Guided | None:
    """Return the request's constraint. Raises ApiError."""
    return None
