"""Finds out which other server's names a command line asks for, and joins flags that it may repeat."""

import os
from collections.abc import Iterable, Sequence
from itertools import pairwise

REPEATED = ("--cors-allow-origin",)
"""Flags that a command line in TGI's spelling may repeat; their values are joined by commas."""


def compat_of(arguments: Sequence[str]) -> str | None:
    """Return the value of `--compat` in a command line, else in the environment."""
    for word, after in pairwise([*arguments, ""]):
        if word == "--compat" or word.startswith("--compat="):
            return word.partition("=")[2] or after
    return os.environ.get("COMPAT")


def join_repeated(arguments: Iterable[str]) -> list[str]:
    """Return the command line with one flag for all values of each flag of REPEATED, at its end."""
    words, values = list[str](), dict[str, list[str]]()
    rest = iter(arguments)
    for word in rest:
        flag, equals, value = word.partition("=")
        if flag not in REPEATED:
            words.append(word)
        elif (given := value if equals else next(rest, None)) is not None:
            values.setdefault(flag, []).append(given)
        else:
            words.append(word)  # the value is missing, which the option itself refuses
    return words + [f"{flag}={','.join(given)}" for flag, given in values.items()]
