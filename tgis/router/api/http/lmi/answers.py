"""Writes whole answers."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from starlette.responses import Response

from tgis.router.api.http.lmi.forms import REASONS, Details, Generated, TokenWriter
from tgis.router.api.http.lmi.parameters import LmiParameters
from tgis.router.api.http.openai.long_answers import SlicedEncoder
from tgis.router.api.service import Result
from tgis.router.sequence import TokenDetail

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True)
class AnswerWriter:
    fields: LmiParameters
    has_details: bool
    tokens: TokenWriter
    encoder: SlicedEncoder

    async def write(self, texts: Sequence[str], results: Sequence[Result], is_list: bool) -> Response:
        """Return the answer: one object, or a list of one for each input."""
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

    async def _other(self, text: str, result: Result) -> Details:
        details = await self._details(result)
        details.generated_text = self._text(text, result)
        return details

    async def _details(self, result: Result) -> Details:
        last, form = result.last, self.tokens.form
        assert last is not None, "a generation ends with an output"
        details = Details(
            finish_reason=REASONS[last.reason],
            generated_tokens=last.num_generated,
            seed=form.seed(result.spec),
            tokens=await self.encoder.tokens(result.tokens, _TextWriter(self.tokens, result.text).write),
        )
        if self.fields.num_top:
            details.top_tokens = await self.encoder.tokens(result.tokens, self._encode_top)
        if self.fields.wants_inputs:
            details.prefill = await self.encoder.tokens(result.input_tokens, _InputWriter(self.tokens).write)
        elif form.is_tgi:
            details.prefill = []
        return details

    def _encode_top(self, part: Sequence[TokenDetail]) -> bytes:
        return _encode([self.tokens.top(token) for token in part])

    def _text(self, text: str, result: Result) -> str:
        return (text if self.fields.return_full_text else "") + "".join(result.text)


class _TextWriter:
    """Writer of a text's tokens, part by part. A text may end between tokens."""

    def __init__(self, tokens: TokenWriter, texts: Sequence[str]) -> None:
        self._tokens, self._texts = tokens, iter(texts)

    def write(self, part: Sequence[TokenDetail]) -> bytes:
        return _encode([self._tokens.generated(token, next(self._texts)) for token in part])


class _InputWriter:
    def __init__(self, tokens: TokenWriter) -> None:
        self._tokens, self._is_first = tokens, True

    def write(self, part: Sequence[TokenDetail]) -> bytes:
        is_first, self._is_first = self._is_first, False
        return _encode(self._tokens.inputs(part, is_first))


def _logprob(result: Result) -> float:
    """Return the log-probability of a text by the model's own logits."""
    return sum(token.logprob for token in result.tokens)
