"""Defines the ids by which requests name soft prompts and LoRA adapters."""

import re

MAX_ID_BYTES = 256
# No part begins with a dot: such names are parent directories, the links that Kubernetes swaps, or files
# that other programs hide or are still writing.
_PART = r"[A-Za-z0-9_-][A-Za-z0-9_.-]*"
_ID = re.compile(rf"{_PART}(/+{_PART})*/*")


def is_adapter_id(text: str) -> bool:
    """Return True for an id. Slashes between its parts and at its end may be repeated, as in paths."""
    return len(text) <= MAX_ID_BYTES and _ID.fullmatch(text) is not None
