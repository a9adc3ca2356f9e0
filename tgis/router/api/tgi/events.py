"""Writes the events of a streamed answer, one for each token."""

from collections.abc import Iterable, Iterator

from msgspec import UNSET

from tgis.router.api.http.answers.text_ends import finish_reason, shown_seed
from tgis.router.api.http.answers.token_texts import ShownToken, TokenTexts
from tgis.router.api.http.json_bodies import encode_json
from tgis.router.api.tgi.answers import GenerateJob
from tgis.router.api.tgi.types import StreamDetails, StreamEvent
from tgis.router.engine.handle import SequenceSpec
from tgis.router.events import Output
from tgis.router.sequence import StopReason, TokenDetail

_NOT_FINISHED = StopReason.NOT_FINISHED  # looked up once, because every token needs it


class EventWriter:
    def __init__(self, job: GenerateJob, spec: SequenceSpec) -> None:
        self._job = job
        self._spec = spec
        self._texts = TokenTexts(job.forms)
        self._text: list[str] = []
        self._index = 0

    def write(self, output: Output) -> bytes:
        """Return the events of all tokens whose texts are known after this output."""
        self._text += output.texts
        if output.reason is _NOT_FINISHED:
            return b"".join(map(_frame, self._events(self._push(output.tokens))))
        assert output.tokens, "only a time limit ends a text between tokens"
        text = "".join(self._text)
        is_end = output.reason is StopReason.EOS_TOKEN
        *others, end = output.tokens
        *events, last = self._events([*self._push(others), *self._texts.finish(end, text, is_end)])
        last.generated_text = self._job.echo + text
        if self._job.shows_details:
            last.details = StreamDetails(
                finish_reason(output), output.num_generated, shown_seed(self._spec), len(self._spec.input_ids)
            )
        return b"".join(map(_frame, (*events, last)))

    def _push(self, tokens: Iterable[TokenDetail]) -> Iterator[ShownToken]:
        for token in tokens:
            yield from self._texts.push(token)

    def _events(self, shown: Iterable[ShownToken]) -> Iterator[StreamEvent]:
        for token, top_tokens in shown:
            self._index += 1
            yield StreamEvent(self._index, token, top_tokens or UNSET)


def _frame(event: StreamEvent) -> bytes:
    return b"data: %b\n\n" % encode_json(event)
