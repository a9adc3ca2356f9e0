"""Assigns each token of an answer the text that it adds. Without special tokens, the texts join to the
answer."""

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from tgis.router.sequence import TokenDetail
from tgis.router.text.detokenizer import Vocabulary


class PrefillToken(msgspec.Struct):
    id: int
    text: str
    logprob: float | None


class Token(msgspec.Struct):
    id: int
    text: str
    logprob: float | None
    special: bool


Prefill = list[PrefillToken]
Tokens = list[Token]


class ShownToken(NamedTuple):
    token: Token
    top_tokens: Tokens
    """Likeliest tokens at this position, if the client asked for them."""


class TokenForms:
    """Converter of single tokens to the form that answers have."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary

    def show(self, detail: TokenDetail) -> ShownToken:
        """Return a token with its vocabulary name as its text."""
        return ShownToken(self._token(detail.token_id, detail.logprob), self.top(detail))

    def prefill(self, tokens: Iterable[TokenDetail], are_first: bool) -> Prefill:
        """Return input tokens. With `are_first`, the first of them has no logprob."""
        return [
            PrefillToken(
                token.token_id,
                self._name(token.token_id),
                None if are_first and index == 0 else token.logprob,
            )
            for index, token in enumerate(tokens)
        ]

    def top(self, detail: TokenDetail) -> Tokens:
        return [self._token(token_id, logprob) for token_id, logprob in detail.top_tokens]

    def _token(self, token_id: int, logprob: float) -> Token:
        return Token(token_id, self._name(token_id), logprob, self.vocabulary.spell(token_id) is None)

    def _name(self, token_id: int) -> str:
        spelled = self.vocabulary.spell(token_id)
        return self.vocabulary.piece(token_id) if spelled is None else spelled.decode(errors="replace")


class TokenTexts:
    """Tokens of one answer in order. A token waits until its text is known: a character may take several
    tokens, and the end of a word may depend on the next token. A special token's text is its name."""

    def __init__(self, forms: TokenForms) -> None:
        self._forms = forms
        self._is_one_behind = forms.vocabulary.is_one_behind
        self._detokenizer = forms.vocabulary.detokenizer()
        self._waiting: list[ShownToken] = []
        self._last: Token | None = None
        """Last token that is not special."""
        self._receiver: Token | None = None
        """Token that the newest text belongs to."""
        self._is_certain = True
        """False while the text of the last token is unknown."""
        self._num_chars = 0

    def push(self, detail: TokenDetail) -> list[ShownToken]:
        """Add the next token, which is not the last one. Return the tokens whose texts have become known."""
        self._add(detail)
        if self._is_certain:
            return self._take(len(self._waiting))
        if not self._is_one_behind:
            return []
        return self._take(next(i for i, each in enumerate(self._waiting) if each.token is self._last))

    def finish(self, detail: TokenDetail, text: str, is_end: bool) -> list[ShownToken]:
        """Add the last token and return the remaining ones. `text` is the whole answer. It lacks an end of
        sequence, and may end within the last token."""
        if is_end:
            shown = self._forms.show(detail)
            shown.token.special = True
            self._waiting.append(shown)
        else:
            self._add(detail)
        if self._receiver is not None and self._num_chars > len(text):
            self._receiver.text = self._receiver.text[: len(text) - self._num_chars]
        elif self._last is not None:
            self._last.text += text[self._num_chars :]
        return self._take(len(self._waiting))

    def _add(self, detail: TokenDetail) -> None:
        shown = self._forms.show(detail)
        self._waiting.append(shown)
        if shown.token.special:
            return
        text = self._detokenizer.push(detail.token_id)
        shown.token.text = ""
        before, self._last = self._last, shown.token
        self._receiver = before if self._is_one_behind else shown.token
        if self._receiver is not None:
            self._receiver.text = text
        self._is_certain = bool(text) and not self._is_one_behind
        self._num_chars += len(text)

    def _take(self, number: int) -> list[ShownToken]:
        taken, self._waiting = self._waiting[:number], self._waiting[number:]
        return taken
