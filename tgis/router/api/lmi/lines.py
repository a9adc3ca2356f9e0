"""Writes the lines of a stream. An error is the last line."""

from collections.abc import Iterable, Iterator

from msgspec import UNSET, UnsetType
from starlette.responses import Response

from tgis.router.api.http.answers.text_ends import finish_reason
from tgis.router.api.http.answers.token_texts import ShownToken, TokenForms
from tgis.router.api.lmi.errors import LmiErrors
from tgis.router.api.lmi.forms import ERROR, Form, Line, LmiDetails
from tgis.router.api.lmi.parameters import LmiParameters
from tgis.router.api.lmi.tokens import AnswerTokens, form_token
from tgis.router.engine.handle import SequenceSpec
from tgis.router.events import Output
from tgis.router.sequence import StopReason, TokenDetail


class LineWriter:
    """Writer of one stream's lines."""

    def __init__(
        self, text: str, fields: LmiParameters, form: Form, has_details: bool, names: TokenForms
    ) -> None:
        self._text = text
        self._fields = fields
        self._form = form
        self._has_details = has_details
        self._tokens = AnswerTokens(names, waits=fields.removes_stops)
        self._shown: list[str] = []
        self._sent: list[str] = []
        """Texts of the tokens that have lines. They may be ahead of `_shown`."""
        self._num_lines = 0

    def write(self, output: Output, spec: SequenceSpec) -> bytes:
        """Return the lines of all tokens whose texts are known after this output."""
        self._shown += output.texts
        if output.reason is StopReason.NOT_FINISHED:
            certain = self._lines(self._push(output.tokens, output.texts))
            return b"".join(map(self._form.encode_line, certain))
        assert output.tokens, "only a time limit of the request ends a text between tokens"
        text = "".join(self._shown)
        is_end = output.reason is StopReason.EOS_TOKEN
        *others, end = output.tokens
        shown = [*self._push(others, output.texts), *self._tokens.finish(end, text, is_end)]
        *lines, last = self._lines(shown)
        last.generated_text = self._echo + text
        if self._has_details:
            last.details = self._details(finish_reason(output), output.num_generated)
            last.details.seed = self._form.seed(spec)
        return b"".join(map(self._form.encode_line, (*lines, last)))

    def fail(self, message: str) -> bytes:
        """Return the last line of a failed stream, with the text so far."""
        details = LmiDetails(finish_reason=ERROR)
        if self._has_details:
            details = self._details(ERROR, self._num_lines)
        line = Line(
            index=self._next_index(),
            token=self._form.error_token(message),
            generated_text=self._echo + "".join(self._sent),
            details=details,
        )
        return self._form.encode_line(line)

    def _push(self, tokens: Iterable[TokenDetail], texts: Iterable[str]) -> Iterator[ShownToken]:
        for token, text in zip(tokens, texts, strict=False):
            yield from self._tokens.push(token, text)

    def _lines(self, shown: Iterable[ShownToken]) -> Iterator[Line]:
        is_tgi = self._form.is_tgi
        absent = None if is_tgi else UNSET
        for token, top_tokens in shown:
            self._sent.append("" if token.special else token.text)
            yield Line(
                index=self._next_index(),
                token=form_token(token, is_tgi),
                top_tokens=[form_token(each, is_tgi) for each in top_tokens] or UNSET,
                generated_text=absent,
                details=absent,
            )

    @property
    def _echo(self) -> str:
        return self._text if self._fields.return_full_text else ""

    def _details(self, reason: str, num_tokens: int) -> LmiDetails:
        return LmiDetails(finish_reason=reason, generated_tokens=num_tokens, inputs=self._text)

    def _next_index(self) -> int | UnsetType:
        """Return the number of the next line in TGI's form; the other forms have no numbers."""
        self._num_lines += 1
        return self._num_lines if self._form.is_tgi else UNSET


class LineErrors:
    """Form of errors for a request with a streamed answer."""

    def __init__(self, errors: LmiErrors, writer: LineWriter) -> None:
        self._errors = errors
        self._writer = writer

    def respond(self, error: Exception) -> Response:
        return self._errors.respond(error)

    def last_events(self, error: Exception) -> bytes:
        return self._writer.fail(self._errors.text(error))
