"""Writes the chunks of a streamed answer of `/v1/chat/completions`."""

from collections.abc import Collection, Iterator, Sequence

import msgspec
from msgspec import UNSET, UnsetType

from tgis.router.api.http.answers.event_stream import encode_event
from tgis.router.api.http.json_bodies import encode_json
from tgis.router.api.openai.answers.dates import unix_time
from tgis.router.api.openai.answers.logprobs import TokenNames, chat_logprobs
from tgis.router.api.openai.answers.usage import Usage, finish_reason, make_usage, stop_reason
from tgis.router.api.openai.chat.answer_form import AnswerForm
from tgis.router.api.openai.chat.answers import AnswerReader
from tgis.router.api.openai.chat.types import ChatChunk, ChatRequest, ChunkChoice, Delta
from tgis.router.chat.answers.pieces import ContentText, ReasoningText
from tgis.router.engine.handle import SequenceSpec
from tgis.router.events import InputTokens, Output
from tgis.router.sequence import StopReason

_NOT_FINISHED = StopReason.NOT_FINISHED  # looked up once, because every token needs it
_MARK = "\N{NULL}"


class ChatChunkWriter:
    """Writer of all choices' chunks."""

    def __init__(
        self,
        body: ChatRequest,
        answer_id: str,
        model: str,
        specs: Sequence[SequenceSpec],
        names: TokenNames,
        form: AnswerForm | None,
    ) -> None:
        self._body = body
        self._specs = specs
        self._names = names
        self._header = ChatChunk(id=answer_id, created=unix_time(), model=model, choices=[])
        options = body.stream_options
        self._has_usage = options is not None and bool(options.include_usage)
        self._has_counts = options is not None and bool(options.continuous_usage_stats)
        self._num_generated = [0] * len(specs)
        self._num_cached = [0] * len(specs)
        self._readers = None if form is None else [AnswerReader(form) for _ in specs]
        self._tells_reasoning = form is not None and form.has_reasoning
        self._is_plain = not (body.logprobs or self._has_counts or body.return_token_ids)
        self._frames = [self._frame(index, Delta(content=_MARK)) for index in range(len(specs))]
        self._reasoning_frames = [
            self._frame(index, Delta(reasoning_content=_MARK)) for index in range(len(self._readers or ()))
        ]

    def begin(self) -> Iterator[bytes]:
        """Yield the first chunk of each choice, which contains the role."""
        for index, spec in enumerate(self._specs):
            choice = ChunkChoice(index, Delta("assistant", ""))
            if self._body.return_token_ids:
                choice.prompt_token_ids = spec.input_ids
            yield self._chunk(choice)

    def write(self, index: int, output: InputTokens | Output) -> bytes:
        """Return the chunks of one output, empty if the output shows nothing."""
        if isinstance(output, InputTokens):
            return b""
        self._num_generated[index], self._num_cached[index] = output.num_generated, output.num_cached
        if not self._is_plain or output.reason is not _NOT_FINISHED:
            return self._write_in_full(index, output)
        if self._readers is not None:
            return self._write_pieces(index, output, self._readers[index])
        before, after = self._frames[index]
        text = output.text
        return before + encode_json(text) + after if text else b""

    def end(self) -> bytes:
        """Return the usage of the whole call if the client asked for it."""
        if not self._has_usage:
            return b""
        usage = self._usage(range(len(self._specs)))
        return encode_event(msgspec.structs.replace(self._header, usage=usage))

    def _write_pieces(self, index: int, output: Output, reader: AnswerReader) -> bytes:
        chunks = []
        for piece in reader.read(output):
            match piece:
                case ContentText(text):
                    before, after = self._frames[index]
                    chunks.append(before + encode_json(text) + after)
                case ReasoningText(text):
                    before, after = self._reasoning_frames[index]
                    chunks.append(before + encode_json(text) + after)
                case _:
                    chunks.append(self._chunk(ChunkChoice(index, reader.delta(piece))))
        return b"".join(chunks)

    def _write_in_full(self, index: int, output: Output) -> bytes:
        """Return chunks of any kind. The first chunk has the details of all tokens."""
        body = self._body
        reader = None if self._readers is None else self._readers[index]
        choices = [ChunkChoice(index, delta) for delta in _deltas(output, reader)]
        tokens = output.tokens
        if not choices and tokens and (body.logprobs or body.return_token_ids):
            choices = [ChunkChoice(index, Delta(content="") if reader is None else Delta())]
        reason = finish_reason(output) if reader is None else reader.finish_reason(output)
        if reason is not None:
            if reader is not None or not choices:
                choices.append(ChunkChoice(index, Delta()))
            choices[-1].finish_reason, choices[-1].stop_reason = (
                reason,
                stop_reason(output, body.stop_token_ids),
            )
        if choices and body.logprobs and tokens:
            choices[0].logprobs = chat_logprobs(tokens, self._names, body.top_logprobs or 0)
        if choices and body.return_token_ids:
            choices[0].token_ids = [token.token_id for token in tokens]
        return b"".join(map(self._chunk, choices))

    def _frame(self, index: int, delta: Delta) -> tuple[bytes, bytes]:
        """Return the bytes around the text in chunks with only a text. The text of `delta` is _MARK."""
        before, _, after = self._chunk(ChunkChoice(index, delta)).rpartition(encode_json(_MARK))
        return before, after

    def _chunk(self, choice: ChunkChoice) -> bytes:
        usage: Usage | UnsetType | None = None if self._has_usage else UNSET
        if self._has_counts:
            usage = self._usage((choice.index,))
        return encode_event(msgspec.structs.replace(self._header, choices=[choice], usage=usage))

    def _usage(self, choices: Collection[int]) -> Usage:
        """Return the usage of some choices of one prompt."""
        num_reasoning = None
        if self._readers is not None and self._tells_reasoning:
            num_reasoning = sum(self._readers[index].num_reasoning for index in choices)
        first = min(choices)
        num_generated = sum(self._num_generated[index] for index in choices)
        num_inputs = len(self._specs[first].input_ids)
        return make_usage(num_inputs, num_generated, self._num_cached[first], num_reasoning)


def _deltas(output: Output, reader: AnswerReader | None) -> list[Delta]:
    if reader is not None:
        return [reader.delta(piece) for piece in reader.read(output)]
    text = output.text
    return [Delta(content=text)] if text else []
