"""Writes the lines of a stream, of which an error is the last."""

from msgspec import UNSET, UnsetType
from starlette.responses import Response

from tgis.router.api.http.lmi.errors import LmiErrors
from tgis.router.api.http.lmi.forms import ERROR, REASONS, Details, Line, TokenWriter
from tgis.router.api.http.lmi.parameters import LmiParameters
from tgis.router.engine.handle import SequenceSpec
from tgis.router.events import Output
from tgis.router.sequence import StopReason


class LineWriter:
    """Writer of one stream's lines."""

    def __init__(self, text: str, fields: LmiParameters, has_details: bool, tokens: TokenWriter) -> None:
        self._text, self._fields, self._has_details, self._tokens = text, fields, has_details, tokens
        self._form = tokens.form
        self._generated = [text] if fields.return_full_text else []
        self._num_generated = 0

    def write(self, output: Output, spec: SequenceSpec) -> bytes:
        self._generated.append(output.text)
        self._num_generated = output.num_generated
        token, tokens = output.token, self._tokens
        line = Line(
            index=self._index(),
            token=self._form.no_token(output.text) if token is None else tokens.generated(token, output.text),
            generated_text=self._unfinished(),
            details=self._unfinished(),
        )
        if self._fields.num_top and token is not None:
            line.top_tokens = tokens.top(token)
        if output.reason is not StopReason.NOT_FINISHED:
            line.generated_text = "".join(self._generated)
            if self._has_details:
                line.details = self._details(REASONS[output.reason])
                line.details.seed = self._form.seed(spec)
        return self._form.line(line)

    def fail(self, message: str) -> bytes:
        """Return the last line of a stream that fails, with the text so far."""
        details = self._details(ERROR) if self._has_details else Details(finish_reason=ERROR)
        return self._form.line(
            Line(
                index=self._index(),
                token=self._form.error_token(message),
                generated_text="".join(self._generated),
                details=details,
            )
        )

    def _details(self, reason: str) -> Details:
        return Details(finish_reason=reason, generated_tokens=self._num_generated, inputs=self._text)

    def _index(self) -> int | UnsetType:
        return self._num_generated if self._form.is_tgi else UNSET

    def _unfinished(self) -> UnsetType | None:
        """Return the value of a field that only the last line has."""
        return None if self._form.is_tgi else UNSET


class LineErrors:
    """Form of the errors of a request that is answered with a stream."""

    def __init__(self, errors: LmiErrors, writer: LineWriter) -> None:
        self._errors, self._writer = errors, writer

    def respond(self, error: Exception) -> Response:
        return self._errors.respond(error)

    def last_events(self, error: Exception) -> bytes:
        return self._writer.fail(self._errors.text(error))
