"""Parses the batch sizes whose decode steps are captured as CUDA graphs."""

from collections.abc import Sequence


def parse_graph_sizes(text: str | None) -> Sequence[int] | None:
    """Return the comma-separated numbers of rows: none of them for "0", and None if `text` is None.

    Raises ValueError."""
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise ValueError(f"{text!r} is neither 0 nor a list of numbers of rows, such as 1,2,4,8")
    return tuple(sorted({int(part) for part in parts} - {0}))
