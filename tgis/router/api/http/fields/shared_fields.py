"""Builds the JSON fields of shared parameters, which several APIs over HTTP read under the same names."""

from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from tgis.sampling_parameters import SHARED, Parameter

MAX_COUNT = 2**31 - 1


def _field(parameter: Parameter) -> tuple[str, Any, None]:
    assert parameter.range is not None, "shared parameters have a range"
    low, high, _ = parameter.range
    return parameter.name, Annotated[float, Meta(ge=low, le=high)] | None, None


if TYPE_CHECKING:
    SharedFields = msgspec.Struct
else:
    SharedFields = msgspec.defstruct("SharedFields", map(_field, SHARED), module=__name__, kw_only=True)
"""Base of a request's fields. None means absent or null."""


def restricts_sampling(fields: SharedFields) -> bool:
    """Return True if a request sets a shared parameter that only affects sampling."""
    return any(getattr(fields, each.name) not in (None, each.off) for each in SHARED if each.random_only)
