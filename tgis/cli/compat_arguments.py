"""Finds the server whose option names a command line asks for."""

import os
from collections.abc import Sequence
from itertools import pairwise


def compat_of(arguments: Sequence[str]) -> str | None:
    """Return the value of `--compat`, else of the variable COMPAT."""
    for word, next_word in pairwise([*arguments, ""]):
        if word == "--compat" or word.startswith("--compat="):
            return word.partition("=")[2] or next_word
    return os.environ.get("COMPAT")
