"""Writes tokens in the forms of answers."""

from collections import deque
from collections.abc import Iterable, Iterator

import msgspec
from msgspec import UNSET, UnsetType

from tgis.router.api.http.answers.token_texts import (
    PrefillToken,
    ShownToken,
    Token,
    TokenForms,
    TokenTexts,
)
from tgis.router.sequence import TokenDetail


class LmiToken(msgspec.Struct):
    id: int
    text: str
    log_prob: float | None
    special_token: bool | UnsetType = UNSET
    """Absent if the token is not special."""
    error_msg: str | UnsetType = UNSET


FormedToken = LmiToken | Token | PrefillToken


def form_token(token: Token, is_tgi: bool) -> FormedToken:
    """Return a token in the answer's form. In LMI's own form, the texts of all tokens join to the answer."""
    if is_tgi:
        return token
    return LmiToken(token.id, "" if token.special else token.text, token.logprob, token.special or UNSET)


def form_inputs(tokens: Iterable[PrefillToken], is_tgi: bool) -> list[FormedToken]:
    return [each if is_tgi else LmiToken(each.id, each.text, each.logprob) for each in tokens]


class AnswerTokens:
    """Tokens of one answer in order, each with the text that it adds. If a stop sequence may still remove
    text, a token waits until its text is shown."""

    def __init__(self, names: TokenForms, waits: bool) -> None:
        self._texts = TokenTexts(names)
        self._waits = waits
        self._pending: deque[ShownToken] = deque()
        self._num_shown = self._num_taken = 0  # numbers of characters

    def push(self, detail: TokenDetail, text: str) -> Iterator[ShownToken]:
        """Add the next token, which is not the last one, and the text shown with it. Yield the final
        tokens."""
        self._num_shown += len(text)
        self._pending += self._texts.push(detail)
        while self._pending and (not self._waits or self._end_of_first() <= self._num_shown):
            self._num_taken = self._end_of_first()
            yield self._pending.popleft()

    def finish(self, detail: TokenDetail, text: str, is_end: bool) -> Iterator[ShownToken]:
        """Add the last token and yield the remaining ones. `text` is the whole answer. It lacks an end of
        sequence, and may end before the last token."""
        self._pending += self._texts.finish(detail, text, is_end)
        while self._pending:
            first = self._pending[0].token
            if not first.special:
                first.text = first.text[: max(len(text) - self._num_taken, 0)]
            self._num_taken = self._end_of_first()
            yield self._pending.popleft()

    def _end_of_first(self) -> int:
        first = self._pending[0].token
        return self._num_taken + (0 if first.special else len(first.text))
