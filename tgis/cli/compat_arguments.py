"""Reads `--compat` from a raw command line, and joins the flags that TGI's command line may repeat."""

import os
from collections.abc import Iterable, Sequence
from itertools import pairwise

REPEATED = ("--cors-allow-origin",)
"""Flags that may be repeated on TGI's command line; their values are joined with commas."""


def compat_of(arguments: Sequence[str]) -> str | None:
    """Return the value of `--compat`, else of the variable COMPAT."""
    for word, next_word in pairwise([*arguments, ""]):
        if word == "--compat" or word.startswith("--compat="):
            return word.partition("=")[2] or next_word
    return os.environ.get("COMPAT")


def join_repeated(arguments: Iterable[str]) -> list[str]:
    """Return the command line with the values of each flag of REPEATED joined into one flag at its end."""
    words: list[str] = []
    values: dict[str, list[str]] = {}
    rest = iter(arguments)
    for word in rest:
        flag, equals, value = word.partition("=")
        if flag not in REPEATED:
            words.append(word)
        elif (given := value if equals else next(rest, None)) is not None:
            values.setdefault(flag, []).append(given)
        else:
            words.append(word)  # the option itself refuses the missing value
    return words + [f"{flag}={','.join(given)}" for flag, given in values.items()]
