"""Forms of answers: the names and values of LMI's own schema, and those of `tgi_compat`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from tgis.config.serving import JSON_FORM, JSON_LINES_FORM, SSE_FORM, TGI_FORM
from tgis.router.api.http.event_stream import JSON_LINES, SERVER_SENT_EVENTS
from tgis.router.api.http.openai.logprobs import finite
from tgis.router.engine.handle import SequenceSpec
from tgis.router.sequence import StopReason, TokenDetail
from tgis.router.text.detokenizer import Vocabulary

REASONS = {
    StopReason.EOS_TOKEN: "eos_token",
    StopReason.STOP_SEQUENCE: "stop_sequence",
    StopReason.MAX_TOKENS: "length",
    StopReason.TOKEN_LIMIT: "length",
    StopReason.TIME_LIMIT: "length",
}
ERROR, NO_TOKEN = "error", -1

_encode = msgspec.json.Encoder().encode


class LmiToken(msgspec.Struct):
    id: int
    text: str
    log_prob: float | None
    special_token: bool | UnsetType = UNSET
    """Absent if the token is not special."""
    error_msg: str | UnsetType = UNSET


class TgiToken(msgspec.Struct):
    id: int
    text: str
    logprob: float | None
    special: bool


Token = LmiToken | TgiToken


class Details(msgspec.Struct, kw_only=True):
    finish_reason: str
    generated_tokens: int | UnsetType = UNSET
    inputs: str | UnsetType = UNSET
    seed: int | UnsetType | None = UNSET
    prefill: Any = UNSET
    tokens: Any = UNSET
    top_tokens: Any = UNSET
    generated_text: str | UnsetType = UNSET
    """Of another text than the best."""
    best_of_sequences: "list[Details] | UnsetType" = UNSET


class Generated(msgspec.Struct):
    """Whole answer for one input."""

    generated_text: str
    details: Details | UnsetType = UNSET


class Line(msgspec.Struct, kw_only=True):
    """Line of a stream, for one token."""

    index: int | UnsetType = UNSET
    token: Token
    top_tokens: list[Token] | UnsetType = UNSET
    generated_text: str | UnsetType | None = UNSET
    details: Details | UnsetType | None = UNSET


@dataclass(frozen=True)
class Form:
    """Form of one answer."""

    is_stream: bool
    is_tgi: bool
    media_type: str

    def token(self, token: TokenDetail, text: str, is_special: bool, is_known: bool = True) -> Token:
        """Return a token with the text that it adds. Nothing is known of an input's first token."""
        logprob = finite(token.logprob) if is_known else None
        if self.is_tgi:
            return TgiToken(token.token_id, text, logprob, is_special)
        return LmiToken(token.token_id, text, logprob, is_special or UNSET)

    def no_token(self, text: str = "") -> Token:
        """Return what stands for a token where a text ends between two."""
        return TgiToken(NO_TOKEN, text, None, True) if self.is_tgi else LmiToken(NO_TOKEN, text, None, True)

    def error_token(self, message: str) -> Token:
        if self.is_tgi:
            return TgiToken(NO_TOKEN, "", -1, True)
        return LmiToken(NO_TOKEN, "", -1, True, message)

    def line(self, line: Line) -> bytes:
        encoded = _encode(line)
        return b"data: %b\n\n" % encoded if self.media_type == SERVER_SENT_EVENTS else encoded + b"\n"

    def seed(self, spec: SequenceSpec) -> int | UnsetType | None:
        """Return the seed of a text that is sampled, as TGI's clients expect."""
        if not self.is_tgi:
            return UNSET
        return None if spec.sampling.greedy else spec.sampling.seed


@dataclass(frozen=True)
class TokenWriter:
    """Writer of tokens in an answer's form."""

    form: Form
    vocabulary: Vocabulary
    special_ids: frozenset[int]

    def generated(self, token: TokenDetail, text: str) -> Token:
        return self.form.token(token, text, token.token_id in self.special_ids)

    def inputs(self, tokens: Sequence[TokenDetail], are_first: bool) -> list[Token]:
        """Return tokens of an input. With `are_first`, nothing is known of the first of them."""
        return [
            self._named(token, is_known=not (are_first and index == 0)) for index, token in enumerate(tokens)
        ]

    def top(self, token: TokenDetail) -> list[Token]:
        return [self._named(TokenDetail(token_id, logprob)) for token_id, logprob in token.top_tokens]

    def _named(self, token: TokenDetail, is_known: bool = True) -> Token:
        spelled = self.vocabulary.spell(token.token_id)
        text = self.vocabulary.piece(token.token_id) if spelled is None else spelled.decode(errors="replace")
        return self.form.token(token, text, token.token_id in self.special_ids, is_known)


def choose_form(formatter: str | None, wants_stream: bool, is_batch: bool) -> Form:
    """Return the form of an answer by `--lmi-output-formatter` and the request. A batch has no stream."""
    is_stream = formatter != JSON_FORM and not is_batch
    is_stream = is_stream and (wants_stream or formatter in (JSON_LINES_FORM, SSE_FORM))
    is_tgi = formatter == TGI_FORM
    if not is_stream:
        return Form(False, is_tgi, "application/json")
    return Form(True, is_tgi, SERVER_SENT_EVENTS if is_tgi or formatter == SSE_FORM else JSON_LINES)
