"""Defines the forms of answers: names and values of LMI's own schema, and of `tgi_compat`."""

from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from tgis.config.serving import JSON_FORM, JSON_LINES_FORM, SSE_FORM, TGI_FORM
from tgis.router.api.http.answers.event_stream import JSON_LINES, SERVER_SENT_EVENTS
from tgis.router.api.http.answers.sliced_encoder import JSON
from tgis.router.api.http.answers.text_ends import shown_seed
from tgis.router.api.http.answers.token_texts import Token
from tgis.router.api.http.json_bodies import encode_json
from tgis.router.api.lmi.tokens import FormedToken, LmiToken
from tgis.router.engine.handle import SequenceSpec

ERROR = "error"
NO_TOKEN = -1


class LmiDetails(msgspec.Struct, kw_only=True):
    finish_reason: str
    generated_tokens: int | UnsetType = UNSET
    inputs: str | UnsetType = UNSET
    seed: int | UnsetType | None = UNSET
    prefill: Any = UNSET
    tokens: Any = UNSET
    top_tokens: Any = UNSET
    generated_text: str | UnsetType = UNSET
    """Set for every text but the best."""
    best_of_sequences: "list[LmiDetails] | UnsetType" = UNSET


class Generated(msgspec.Struct):
    """Whole answer for one input."""

    generated_text: str
    details: LmiDetails | UnsetType = UNSET


class Line(msgspec.Struct, kw_only=True):
    """Line of a stream, for one token. Only the last line has the whole text and the details."""

    index: int | UnsetType = UNSET
    token: FormedToken
    top_tokens: list[FormedToken] | UnsetType = UNSET
    generated_text: str | UnsetType | None = UNSET
    details: LmiDetails | UnsetType | None = UNSET


@dataclass(frozen=True)
class Form:
    """Form of one answer."""

    is_stream: bool
    is_tgi: bool
    media_type: str

    def error_token(self, message: str) -> FormedToken:
        if self.is_tgi:
            return Token(NO_TOKEN, "", -1, True)
        return LmiToken(NO_TOKEN, "", -1, True, message)

    def encode_line(self, line: Line) -> bytes:
        encoded = encode_json(line)
        return b"data: %b\n\n" % encoded if self.media_type == SERVER_SENT_EVENTS else encoded + b"\n"

    def seed(self, spec: SequenceSpec) -> int | UnsetType | None:
        """Return the seed of a sampled text in TGI's form, whose clients expect it."""
        return shown_seed(spec) if self.is_tgi else UNSET


def choose_form(formatter: str | None, wants_stream: bool, is_batch: bool) -> Form:
    """Return the form of an answer for `--lmi-output-formatter` and the request. A batch has no stream."""
    is_stream = wants_stream or formatter in (JSON_LINES_FORM, SSE_FORM)
    is_tgi = formatter == TGI_FORM
    if not is_stream or is_batch or formatter == JSON_FORM:
        return Form(False, is_tgi, JSON)
    return Form(True, is_tgi, SERVER_SENT_EVENTS if is_tgi or formatter == SSE_FORM else JSON_LINES)
