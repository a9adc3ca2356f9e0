"""Finds the server whose option names a command line asks for."""

import os
from collections.abc import Sequence
from itertools import pairwise


def compat_of(arguments: Sequence[str]) -> str | None:
    """Return the value of `--compat` in a command line, else in the environment."""
    for word, after in pairwise([*arguments, ""]):
        if word == "--compat" or word.startswith("--compat="):
            return word.partition("=")[2] or after
    return os.environ.get("COMPAT")
