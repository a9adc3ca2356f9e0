"""Joins the flags that a command line in TGI's spelling may repeat."""

from collections.abc import Collection, Sequence

REPEATED = ("--cors-allow-origin",)
"""Flags whose values are joined by commas."""


def join_repeated(arguments: Sequence[str], switches: Collection[str] = ()) -> list[str]:
    """Return the command line with a single flag, at its end, for all values of each flag in REPEATED."""
    words, values = list[str](), dict[str, list[str]]()
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
