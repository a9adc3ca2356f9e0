"""Writes the chunks of a streamed answer of `/v1/completions`."""

from collections.abc import AsyncIterator, Iterator, Sequence

import msgspec

from tgis.router.api.http.answers.event_stream import encode_event
from tgis.router.api.http.json_bodies import encode_json
from tgis.router.api.openai.answers.logprobs import CompletionLogprobs, CompletionLogprobsWriter
from tgis.router.api.openai.answers.usage import Usage, finish_reason, make_usage, stop_reason
from tgis.router.api.openai.completions.choices import CompletionJob, PromptPart, describe_prompt
from tgis.router.api.openai.completions.types import Completion, CompletionChoice
from tgis.router.engine.handle import SequenceSpec
from tgis.router.events import Output
from tgis.router.sequence import StopReason, TokenDetail

_NOT_FINISHED = StopReason.NOT_FINISHED  # looked up once, because every token needs it


class ChunkWriter:
    """Writer of all choices' chunks. Choices that show log-probabilities of their prompt wait for these,
    which arrive with the prompt's first choice."""

    def __init__(self, job: CompletionJob, specs: list[SequenceSpec]) -> None:
        self._job = job
        self._specs = specs
        self._n = job.call.parameters.n
        body = job.body
        options = job.body.stream_options
        self._has_usage = options is not None and bool(options.include_usage)
        self._has_counts = options is not None and bool(options.continuous_usage_stats)
        self._writers: dict[int, CompletionLogprobsWriter] = {}
        self._waits = [job.call.parameters.input_tokens] * len(specs)
        self._waiting: list[list[Output]] = [[] for _ in specs]
        self._num_generated = [0] * len(specs)
        self._num_cached = [0] * len(specs)
        is_plain = body.logprobs is None and not self._has_counts and not body.return_token_ids
        self._is_plain = is_plain and not job.is_scored_only
        self._frames = [self._frame(index) for index in range(len(specs))]

    def _frame(self, index: int) -> tuple[bytes, bytes]:
        """Return the bytes before and after the text in chunks with only a text."""
        mark = "\N{NULL}"
        before, _, after = self._chunk(CompletionChoice(index, mark)).rpartition(encode_json(mark))
        return before, after

    async def begin(self) -> AsyncIterator[bytes]:
        """Yield the first chunks, of the prompts that need not wait."""
        for index in range(0, len(self._specs), self._n):
            if not self._waits[index]:
                async for chunk in self.write_prompt(index, ()):
                    yield chunk

    async def write_prompt(self, index: int, tokens: tuple[TokenDetail, ...]) -> AsyncIterator[bytes]:
        """Yield a prompt for each of its choices if the answer shows prompts, then the outputs that waited
        for it. `index` is that of the prompt's first choice."""
        prompt = await describe_prompt(self._job, index // self._n, self._specs[index], tokens)
        for sibling in range(index, index + self._n):
            for chunk in self._first(sibling, prompt):
                yield chunk

    def write(self, index: int, output: Output) -> Iterator[bytes]:
        """Yield the chunks of one output."""
        if self._waits[index]:
            self._waiting[index].append(output)
        elif self._is_plain and output.reason is _NOT_FINISHED:
            if text := output.text:
                before, after = self._frames[index]
                yield before + encode_json(text) + after
        else:
            yield from self._write(index, output)

    def end(self) -> Iterator[bytes]:
        """Yield the usage of the whole call if the client asked for it."""
        if self._has_usage:
            usage = self._usage(range(0, len(self._specs), self._n), range(len(self._specs)))
            yield encode_event(msgspec.structs.replace(self._job.header, usage=usage))

    def _first(self, index: int, prompt: PromptPart) -> Iterator[bytes]:
        body = self._job.body
        spec = self._specs[index]
        self._waits[index] = False
        logprobs = None
        if body.logprobs is not None:
            writer = CompletionLogprobsWriter(self._job.names, body.logprobs, len(prompt.echo))
            self._writers[index] = writer
            logprobs = self._job.encoder.join(prompt.logprobs)
        if body.echo or body.prompt_logprobs is not None or body.return_token_ids:
            choice = CompletionChoice(
                index,
                prompt.echo,
                logprobs,
                prompt_logprobs=prompt.details,
                prompt_token_ids=spec.input_ids if body.return_token_ids else None,
            )
            yield from self._job.encoder.parts(self._chunk(choice))
        outputs = self._waiting[index]
        self._waiting[index] = []
        for output in outputs:
            yield from self._write(index, output)

    def _write(self, index: int, output: Output) -> Iterator[bytes]:
        job = self._job
        reason = finish_reason(output)
        if job.is_scored_only:
            if reason is not None:
                self._num_cached[index] = output.num_cached
                yield self._chunk(CompletionChoice(index, "", finish_reason="length"))
            return
        self._num_generated[index], self._num_cached[index] = output.num_generated, output.num_cached
        text, tokens = output.text, output.tokens
        logprobs = self._token_logprobs(index, tokens)
        if not text and reason is None and logprobs is None and not job.body.return_token_ids:
            return
        choice = CompletionChoice(
            index,
            text,
            logprobs,
            reason,
            stop_reason(output, job.body.stop_token_ids),
            token_ids=[token.token_id for token in tokens] if job.body.return_token_ids else None,
        )
        yield self._chunk(choice)

    def _token_logprobs(self, index: int, tokens: Sequence[TokenDetail]) -> CompletionLogprobs | None:
        writer = self._writers.get(index)
        return None if writer is None or not tokens else writer.write(tokens)

    def _chunk(self, choice: CompletionChoice) -> bytes:
        usage = self._usage((choice.index,), (choice.index,)) if self._has_counts else None
        header = self._job.header
        return encode_event(
            Completion(
                id=header.id, created=header.created, model=header.model, choices=[choice], usage=usage
            )
        )

    def _usage(self, prompts: Sequence[int], choices: Sequence[int]) -> Usage:
        return make_usage(
            sum(len(self._specs[index].input_ids) for index in prompts),
            sum(self._num_generated[index] for index in choices),
            sum(self._num_cached[index] for index in prompts),
        )
