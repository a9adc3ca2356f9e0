"""Writes answers that are not streams."""

from collections.abc import Sequence
from dataclasses import dataclass

from starlette.responses import Response

from tgis.router.api.http.answers.sliced_encoder import SlicedEncoder
from tgis.router.api.http.answers.text_ends import finish_reason
from tgis.router.api.http.answers.token_texts import ShownToken, TokenForms
from tgis.router.api.http.json_bodies import encode_json
from tgis.router.api.lmi.forms import Form, Generated, LmiDetails
from tgis.router.api.lmi.parameters import LmiParameters
from tgis.router.api.lmi.tokens import AnswerTokens, form_inputs, form_token
from tgis.router.api.service import Result
from tgis.router.events import Output
from tgis.router.sequence import StopReason, TokenDetail


@dataclass(frozen=True)
class AnswerWriter:
    fields: LmiParameters
    form: Form
    has_details: bool
    names: TokenForms
    encoder: SlicedEncoder

    async def write(self, texts: Sequence[str], results: Sequence[Result], is_list: bool) -> Response:
        """Return the answer: one object, or a list with one object for each input."""
        num = self.fields.num_texts
        answers = [
            await self._generated(text, results[start : start + num])
            for text, start in zip(texts, range(0, len(results), num), strict=True)
        ]
        return self.encoder.answer(answers if is_list else answers[0])

    async def _generated(self, text: str, results: Sequence[Result]) -> Generated:
        best, *others = sorted(results, key=_logprob, reverse=True)[: self.fields.num_shown]
        shown = self._text(text, best)
        if not self.has_details:
            return Generated(shown)
        details = await self._details(best)
        details.inputs = text
        if others:
            details.best_of_sequences = [await self._other(text, other) for other in others]
        return Generated(shown, details)

    async def _other(self, text: str, result: Result) -> LmiDetails:
        details = await self._details(result)
        details.generated_text = self._text(text, result)
        return details

    async def _details(self, result: Result) -> LmiDetails:
        last = _last(result)
        encoder = self.encoder
        details = LmiDetails(
            finish_reason=finish_reason(last),
            generated_tokens=last.num_generated,
            seed=self.form.seed(result.spec),
            tokens=await encoder.tokens(result.tokens, _TokenWriter(self, result).write),
        )
        if self.fields.num_top:
            details.top_tokens = await encoder.tokens(result.tokens, self._encode_top)
        if self.fields.wants_inputs:
            details.prefill = await encoder.tokens(result.input_tokens, _InputWriter(self).write)
        elif self.form.is_tgi:
            details.prefill = []
        return details

    def _encode_top(self, part: Sequence[TokenDetail]) -> bytes:
        is_tgi = self.form.is_tgi
        return encode_json([[form_token(each, is_tgi) for each in self.names.top(token)] for token in part])

    def _text(self, text: str, result: Result) -> str:
        return (text if self.fields.return_full_text else "") + result.text


class _TokenWriter:
    """Writer of a complete text's tokens, part by part."""

    def __init__(self, answer: AnswerWriter, result: Result) -> None:
        self._is_tgi = answer.form.is_tgi
        self._result = result
        self._tokens = AnswerTokens(answer.names, waits=True)
        self._num_written = 0

    def write(self, part: Sequence[TokenDetail]) -> bytes:
        return encode_json(
            [form_token(shown.token, self._is_tgi) for detail in part for shown in self._push(detail)]
        )

    def _push(self, detail: TokenDetail) -> list[ShownToken]:
        texts = self._result.texts
        number = self._num_written
        self._num_written += 1
        if self._num_written < len(self._result.tokens):
            return [*self._tokens.push(detail, texts[number])]
        is_end = _last(self._result).reason is StopReason.EOS_TOKEN
        return [*self._tokens.finish(detail, "".join(texts), is_end)]


class _InputWriter:
    def __init__(self, answer: AnswerWriter) -> None:
        self._answer = answer
        self._is_first = True

    def write(self, part: Sequence[TokenDetail]) -> bytes:
        is_first = self._is_first
        self._is_first = False
        answer = self._answer
        return encode_json(form_inputs(answer.names.prefill(part, is_first), answer.form.is_tgi))


def _last(result: Result) -> Output:
    assert result.last is not None, "a generation ends with an output"
    return result.last


def _logprob(result: Result) -> float:
    """Return the log-probability of a text, computed from the model's own logits."""
    return sum(token.logprob for token in result.tokens)
