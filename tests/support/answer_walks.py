"""Follows answer grammars token by token, for models with and without tokens for marks."""

import random
import re
from collections.abc import Callable, Iterator

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from tests.support.answer_cases import MARKS
from tgis.router.grammar.worker import ByteVocabulary

END = 256
FIRST = 257


class Vocabulary(ByteVocabulary):
    """Vocabulary of all bytes, an end token, and tokens for marks. Texts match the marks' tokens too unless
    they `are_special`."""

    def __init__(self, are_special: bool) -> None:
        super().__init__()
        self.tokens = (*self.tokens, *(mark.encode() for mark in MARKS))
        self.special_token_ids = (END, *(range(FIRST, len(self.tokens)) if are_special else ()))


def token_of(mark: str) -> int:
    return FIRST + MARKS.index(mark)


def no_token(mark: str) -> None:
    return None


KINDS: dict[str, tuple[LLTokenizer, Callable[[str], int | None]]] = {
    "special": (LLTokenizer(TokenizerWrapper(Vocabulary(True))), token_of),
    "added": (LLTokenizer(TokenizerWrapper(Vocabulary(False))), token_of),
    "text": (LLTokenizer(TokenizerWrapper(ByteVocabulary())), no_token),
}


def token_ids(text: str, kind: str) -> Iterator[int]:
    """Yield the tokens of a text. Marks in it are tokens if the model has them."""
    pattern = f"({'|'.join(map(re.escape, MARKS))})"
    for part in [text] if kind == "text" else re.split(pattern, text):
        yield from [token_of(part)] if part in MARKS and kind != "text" else part.encode()


def spell(ids: list[int]) -> str:
    marks = {token_of(mark): mark.encode() for mark in MARKS}
    return b"".join(marks.get(i) or bytes([i]) for i in ids).decode(errors="replace")


class Walk:
    """Matcher that follows a grammar token by token."""

    def __init__(self, grammar: str, kind: str) -> None:
        self._matcher = LLMatcher(KINDS[kind][0], grammar, log_level=0)
        assert not self._matcher.is_error(), self._matcher.get_error()
        self.ids: list[int] = []

    @property
    def may_end(self) -> bool:
        return self._matcher.is_accepting()

    def allowed(self) -> set[int]:
        if self._matcher.is_stopped():
            return set()
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        return {*np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist()} - {END}

    def push(self, token_id: int) -> None:
        assert self._matcher.consume_token(token_id)
        self.ids.append(token_id)


def takes(grammar: str, text: str, kind: str) -> bool:
    walk = Walk(grammar, kind)
    for token_id in token_ids(text, kind):
        if token_id not in walk.allowed():
            return False
        walk.push(token_id)
    return walk.may_end


def wander(grammar: str, kind: str, intent: list[int], r: random.Random) -> str | None:
    """Write the intended text as far as the grammar allows it, and any allowed token otherwise. Return None
    if the text does not end."""
    walk = Walk(grammar, kind)
    for _ in range(600):
        allowed = walk.allowed()
        while intent and intent[0] not in allowed and r.random() < 0.6:
            intent.pop(0)
        if intent and intent[0] in allowed:
            walk.push(intent.pop(0))
        elif walk.may_end and (not intent or not allowed):
            return spell(walk.ids)
        else:
            usual = sorted(allowed.intersection(b'"}]:0 a\n,'))
            walk.push(r.choice(usual if usual and r.random() < 0.7 else sorted(allowed)))
    return None
