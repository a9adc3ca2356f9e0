"""Pieces of an answer, in the order in which a model writes them."""

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
