"""Chunks of a streamed answer of `/v1/chat/completions`."""

from collections.abc import Iterator, Sequence

import msgspec
from msgspec import UNSET, UnsetType

from tgis.router.api.http.openai.chat.types import ChatChunk, ChatRequest, ChunkChoice, Delta
from tgis.router.api.http.openai.dates import unix_time
from tgis.router.api.http.openai.events import encode_event
from tgis.router.api.http.openai.logprobs import TokenNames, chat_logprobs
from tgis.router.api.http.openai.usage import Usage, finish_reason, make_usage, stop_reason
from tgis.router.engine.handle import SequenceSpec
from tgis.router.events import InputTokens, Output
from tgis.router.sequence import StopReason

_encode = msgspec.json.Encoder().encode
_NOT_FINISHED = StopReason.NOT_FINISHED  # looked up once, because every token needs it


class ChatChunkWriter:
    """Writer of all choices' chunks."""

    def __init__(
        self,
        body: ChatRequest,
        answer_id: str,
        model: str,
        specs: Sequence[SequenceSpec],
        names: TokenNames,
    ) -> None:
        self._body, self._specs, self._names = body, specs, names
        self._header = ChatChunk(id=answer_id, created=unix_time(), model=model, choices=[])
        options = body.stream_options
        self._has_usage = options is not None and bool(options.include_usage)
        self._has_counts = options is not None and bool(options.continuous_usage_stats)
        self._num_generated = [0] * len(specs)
        self._num_cached = [0] * len(specs)
        self._is_plain = not (body.logprobs or self._has_counts or body.return_token_ids)
        self._frames = [self._frame(index) for index in range(len(specs))]

    def begin(self) -> Iterator[bytes]:
        """Yield the first chunk of each choice, which tells the role."""
        for index, spec in enumerate(self._specs):
            choice = ChunkChoice(index, Delta("assistant", ""))
            if self._body.return_token_ids:
                choice.prompt_token_ids = spec.input_ids
            yield self._chunk(choice)

    def write(self, index: int, output: InputTokens | Output) -> bytes:
        """Return the chunk of one output; empty if it has nothing to tell."""
        if isinstance(output, InputTokens):
            return b""
        self._num_generated[index], self._num_cached[index] = output.num_generated, output.num_cached
        if self._is_plain and output.reason is _NOT_FINISHED:
            before, after = self._frames[index]
            return before + _encode(output.text) + after if output.text else b""
        return self._write_in_full(index, output)

    def end(self) -> bytes:
        """Return the usage of the whole call, if that was asked for."""
        if not self._has_usage:
            return b""
        num_inputs = len(self._specs[0].input_ids)
        usage = make_usage(num_inputs, sum(self._num_generated), self._num_cached[0])
        return encode_event(msgspec.structs.replace(self._header, usage=usage))

    def _write_in_full(self, index: int, output: Output) -> bytes:
        body, reason = self._body, finish_reason(output)
        tokens = [] if output.token is None else [output.token]
        has_details = bool(tokens and (body.logprobs or body.return_token_ids))
        if not (output.text or reason or has_details):
            return b""
        choice = ChunkChoice(index, Delta(content=output.text) if output.text or has_details else Delta())
        if body.logprobs and tokens:
            choice.logprobs = chat_logprobs(tokens, self._names, body.top_logprobs or 0)
        if body.return_token_ids:
            choice.token_ids = [token.token_id for token in tokens]
        if reason is not None:
            choice.finish_reason, choice.stop_reason = reason, stop_reason(output, body.stop_token_ids)
        return self._chunk(choice)

    def _frame(self, index: int) -> tuple[bytes, bytes]:
        """Return what is before and after the text in chunks of nothing else."""
        mark = "\N{NULL}"
        before, _, after = self._chunk(ChunkChoice(index, Delta(content=mark))).rpartition(_encode(mark))
        return before, after

    def _chunk(self, choice: ChunkChoice) -> bytes:
        chunk = msgspec.structs.replace(self._header, choices=[choice], usage=self._usage(choice.index))
        return encode_event(chunk)

    def _usage(self, index: int) -> Usage | UnsetType | None:
        if self._has_counts:
            num_inputs = len(self._specs[index].input_ids)
            return make_usage(num_inputs, self._num_generated[index], self._num_cached[index])
        return None if self._has_usage else UNSET
