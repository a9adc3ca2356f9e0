"""Pieces of an answer, in the order in which a model writes them."""

from collections.abc import Iterable
from itertools import groupby
from typing import NamedTuple


class ReasoningText(NamedTuple):
    text: str


class ContentText(NamedTuple):
    text: str


class CallBegin(NamedTuple):
    """Begin of a call. The texts of its arguments follow, before anything else."""

    name: str


class CallArguments(NamedTuple):
    """Part of the arguments' JSON, as the model has written it."""

    text: str


Piece = ReasoningText | ContentText | CallBegin | CallArguments


def join_pieces(pieces: Iterable[Piece]) -> list[Piece]:
    """Join the texts of neighbours of one kind. Begins of calls stay as they are."""
    joined: list[Piece] = []
    for kind, neighbours in groupby(pieces, type):
        if kind is CallBegin:
            joined += neighbours
        else:
            joined.append(kind("".join([piece[0] for piece in neighbours])))
    return joined
