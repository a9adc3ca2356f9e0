"""Private parts of transformers. No other file may use them.

Checked with transformers 5.23.0. In use: the mark of models that keep a state other than keys and values. If
a version drops it, `check_scores` refuses such models, with a less clear error.
tests/shard/models/hf_transformers/test_transformers_internals.py says what has changed."""

from typing import Any


def keeps_state(model: Any) -> bool:
    """Return whether a model is marked as one that keeps a state other than keys and values."""
    return getattr(model, "_is_stateful", False)
