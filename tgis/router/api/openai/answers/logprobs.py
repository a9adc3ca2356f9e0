"""Writes tokens and log-probabilities in the forms of completions and chat completions."""

import codecs
from collections.abc import Callable, Iterable
from typing import NamedTuple

import msgspec

from tgis.router.sequence import TokenDetail
from tgis.router.text.detokenizer import Vocabulary

LEAST = -9999.0
"""Log-probability of an impossible token, because JSON has no infinity."""


class CompletionLogprobs(msgspec.Struct):
    text_offset: list[int] = msgspec.field(default_factory=list)
    token_logprobs: list[float | None] = msgspec.field(default_factory=list)
    tokens: list[str] = msgspec.field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = msgspec.field(default_factory=list)


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[TokenLogprob]
    refusal: None = None


class PromptLogprob(msgspec.Struct):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class TokenNames(NamedTuple):
    """Names of tokens in an answer."""

    vocabulary: Vocabulary
    are_ids: bool = False
    """True to name tokens by `token_id:` and the id."""
    bytes_prefix: str = "bytes:"
    """Prefix of bytes that are not valid text."""

    def of(self, token_id: int) -> str:
        if self.are_ids:
            return f"token_id:{token_id}"
        return self.text(token_id)

    def text(self, token_id: int) -> str:
        spelled = self.vocabulary.spell(token_id)
        if spelled is None:
            return self.vocabulary.piece(token_id)
        try:
            return spelled.decode()
        except UnicodeDecodeError:
            return self.bytes_prefix + "".join(f"\\x{byte:02x}" for byte in spelled)


def finite(logprob: float) -> float:
    return logprob if logprob > LEAST else LEAST


class CompletionLogprobsWriter:
    """Writer of the log-probabilities of one choice's tokens, in order."""

    def __init__(self, names: TokenNames, num_top: int, start: int = 0) -> None:
        """Create a writer. `start` is the number of characters before the first token."""
        self._names = names
        self._num_top = num_top
        self._offset = start
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def write(self, tokens: Iterable[TokenDetail], are_first: bool = False) -> CompletionLogprobs:
        """Return the log-probabilities of the next tokens. With `are_first`, the first token has none."""
        logprobs = CompletionLogprobs()
        for index, token in enumerate(tokens):
            is_unknown = are_first and index == 0
            logprobs.text_offset.append(max(self._offset, 0))
            logprobs.tokens.append(self._names.of(token.token_id))
            logprobs.token_logprobs.append(None if is_unknown else finite(token.logprob))
            logprobs.top_logprobs.append(None if is_unknown else self._top(token))
            self._offset += len(self._decoder.decode(self._names.vocabulary.spell(token.token_id) or b""))
        return logprobs

    def _top(self, token: TokenDetail) -> dict[str, float]:
        """Return the top tokens and the token itself by name. The likeliest of equal names stays."""
        top: dict[str, float] = {}
        for token_id, logprob in (*token.top_tokens[: self._num_top], (token.token_id, token.logprob)):
            top.setdefault(self._names.of(token_id), finite(logprob))
        return top


def spell_text(vocabulary: Vocabulary, token_ids: Iterable[int]) -> str:
    """Return the text of tokens that continue a text, without special tokens."""
    return b"".join(vocabulary.spell(token_id) or b"" for token_id in token_ids).decode(errors="replace")


def chat_logprobs(tokens: Iterable[TokenDetail], names: TokenNames, num_top: int) -> ChatLogprobs:
    names = names._replace(bytes_prefix="")
    return ChatLogprobs([_chat_token(token, names, num_top) for token in tokens])


def _chat_token(token: TokenDetail, names: TokenNames, num_top: int) -> TokenLogprob:
    spell = _bytes_of(names.vocabulary)
    top = [
        TopLogprob(names.of(token_id), finite(logprob), spell(token_id))
        for token_id, logprob in token.top_tokens[:num_top]
    ]
    return TokenLogprob(names.of(token.token_id), finite(token.logprob), spell(token.token_id), top)


def _bytes_of(vocabulary: Vocabulary) -> Callable[[int], list[int] | None]:
    def spell(token_id: int) -> list[int] | None:
        spelled = vocabulary.spell(token_id)
        return None if spelled is None else list(spelled)

    return spell


def prompt_logprobs(
    tokens: Iterable[TokenDetail], names: TokenNames, num_top: int, are_first: bool = True
) -> PromptLogprobs:
    """Return the log-probabilities of input tokens by id. With `are_first`, the first token has none."""
    return [
        None if are_first and index == 0 else _ranked(token, names, num_top)
        for index, token in enumerate(tokens)
    ]


def _ranked(token: TokenDetail, names: TokenNames, num_top: int) -> dict[str, PromptLogprob]:
    ranked = [(token.token_id, token.logprob, token.rank)]
    top = token.top_tokens[:num_top]
    ranked += [(token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(top, 1)]
    shown: dict[str, PromptLogprob] = {}
    for token_id, logprob, rank in ranked:
        shown.setdefault(str(token_id), PromptLogprob(finite(logprob), rank, names.text(token_id)))
    return shown
