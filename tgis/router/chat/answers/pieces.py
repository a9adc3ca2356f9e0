"""Pieces of an answer, in the order of the model's text."""

from collections.abc import Iterable
from itertools import groupby
from typing import NamedTuple


class ReasoningText(NamedTuple):
    text: str


class ContentText(NamedTuple):
    text: str


class CallBegin(NamedTuple):
    """Beginning of a call. The pieces of its arguments follow immediately."""

    name: str


class CallArguments(NamedTuple):
    """Part of the arguments' JSON, as written by the model."""

    text: str


Piece = ReasoningText | ContentText | CallBegin | CallArguments


def join_pieces(pieces: Iterable[Piece]) -> list[Piece]:
    """Join the texts of adjacent pieces of one kind. CallBegin pieces are unchanged."""
    joined: list[Piece] = []
    for kind, neighbours in groupby(pieces, type):
        if kind is CallBegin:
            joined += neighbours
        else:
            joined.append(kind("".join([piece[0] for piece in neighbours])))
    return joined
