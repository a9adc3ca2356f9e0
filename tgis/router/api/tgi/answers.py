"""Writes answers that are not streams, with their headers."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec import UNSET, UnsetType
from starlette.responses import Response

from tgis.router.api.http.answers.sliced_encoder import SlicedEncoder
from tgis.router.api.http.answers.text_ends import finish_reason, shown_seed
from tgis.router.api.http.answers.token_texts import Prefill, ShownToken, TokenForms, Tokens, TokenTexts
from tgis.router.api.http.json_bodies import encode_json
from tgis.router.api.service import Result
from tgis.router.api.tgi.types import (
    BestOfSequence,
    GenerateAnswer,
    GenerateRequest,
    TextDetails,
    TopTokens,
)
from tgis.router.events import Output
from tgis.router.requests.call import GenerationCall
from tgis.router.sequence import StopReason, TokenDetail


@dataclass(frozen=True)
class GenerateJob:
    """Request after reading, with its call to the service."""

    body: GenerateRequest
    call: GenerationCall
    forms: TokenForms
    is_in_list: bool
    """True if the answer is the only item of a list, and texts include their input by default."""
    compute_type: str
    began_at: float = field(default_factory=time.monotonic)

    @property
    def shows_details(self) -> bool:
        given = self.body.parameters
        return given is not None and bool(given.details or given.decoder_input_details)

    @property
    def echo(self) -> str:
        """Text before the generated text: the input or nothing."""
        wish = self.body.parameters.return_full_text if self.body.parameters is not None else None
        return self.body.inputs if (self.is_in_list if wish is None else wish) else ""

    @property
    def headers(self) -> dict[str, str]:
        """Headers of every answer."""
        return {"x-compute-type": self.compute_type, "x-compute-characters": str(len(self.body.inputs))}


async def write_answer(job: GenerateJob, results: Sequence[Result], encoder: SlicedEncoder) -> Response:
    """Return the answer of a call. The results are texts for one input."""
    ended_at = time.monotonic()
    best = max(range(len(results)), key=lambda index: _mean_logprob(results[index]))
    others = [result for index, result in enumerate(results) if index != best]
    winner = results[best]
    answer = GenerateAnswer(job.echo + winner.text)
    if job.shows_details:
        sequence = await _describe(job, winner, encoder)
        answer.details = TextDetails(
            sequence.finish_reason,
            sequence.generated_tokens,
            sequence.seed,
            sequence.prefill,
            sequence.tokens,
            [await _describe(job, other, encoder) for other in others] or UNSET,
            sequence.top_tokens,
        )
    response = encoder.answer([answer] if job.is_in_list else answer)
    response.headers.update(job.headers | _measured(winner, ended_at - job.began_at))
    return response


def _mean_logprob(result: Result) -> float:
    return sum(token.logprob for token in result.tokens) / max(len(result.tokens), 1)


def _last(result: Result) -> Output:
    assert result.last is not None, "a generation ends with an output"
    return result.last


async def _describe(job: GenerateJob, result: Result, encoder: SlicedEncoder) -> BestOfSequence:
    last = _last(result)
    parameters = job.call.parameters
    writer = _TokensWriter(job.forms, result)
    tokens: Tokens = await encoder.tokens(result.tokens, writer.write)
    top: TopTokens | UnsetType = UNSET
    if parameters.top_n_tokens:
        top = await encoder.tokens(result.tokens, writer.write_top)
    prefill: Prefill = []
    if parameters.input_tokens:
        prefill = await encoder.tokens(result.input_tokens, _PrefillWriter(job.forms).write)
    return BestOfSequence(
        job.echo + result.text,
        finish_reason(last),
        last.num_generated,
        shown_seed(result.spec),
        prefill,
        tokens,
        top,
    )


class _TokensWriter:
    """Writer of a complete text's tokens, part by part."""

    def __init__(self, forms: TokenForms, result: Result) -> None:
        self._forms = forms
        self._result = result
        self._texts = TokenTexts(forms)
        self._num_left = len(result.tokens)

    def write(self, part: Sequence[TokenDetail]) -> bytes:
        tokens: Tokens = []
        for detail in part:
            self._num_left -= 1
            shown = self._texts.push(detail) if self._num_left else self._finish(detail)
            tokens += [each.token for each in shown]
        return encode_json(tokens)

    def write_top(self, part: Sequence[TokenDetail]) -> bytes:
        return encode_json([self._forms.top(detail) for detail in part])

    def _finish(self, detail: TokenDetail) -> list[ShownToken]:
        is_end = _last(self._result).reason is StopReason.EOS_TOKEN
        return self._texts.finish(detail, self._result.text, is_end)


class _PrefillWriter:
    def __init__(self, forms: TokenForms) -> None:
        self._forms = forms
        self._is_first = True

    def write(self, part: Sequence[TokenDetail]) -> bytes:
        is_first = self._is_first
        self._is_first = False
        return encode_json(self._forms.prefill(part, is_first))


def _measured(result: Result, total_s: float) -> dict[str, str]:
    """Return the headers with times in milliseconds and with numbers of tokens."""
    last = _last(result)
    timings = last.timings
    assert timings is not None, "the last output has timings"
    return {
        "x-compute-time": f"{total_s:.6f}",
        "x-total-time": _milliseconds(total_s),
        "x-validation-time": _milliseconds(max(total_s - timings.total_s, 0)),
        "x-queue-time": _milliseconds(timings.queue_s),
        "x-inference-time": _milliseconds(timings.inference_s),
        "x-time-per-token": _milliseconds(timings.inference_s / max(last.num_generated, 1)),
        "x-prompt-tokens": str(len(result.spec.input_ids)),
        "x-generated-tokens": str(last.num_generated),
    }


def _milliseconds(seconds: float) -> str:
    return str(int(1000 * seconds))
