"""Writes the choices of `/v1/completions` answers, and the parts that streams share with whole answers."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tgis.router.api.openai.answers.logprobs import (
    CompletionLogprobsWriter,
    PromptLogprobs,
    TokenNames,
    spell_text,
)
from tgis.router.api.openai.answers.logprobs_encoder import EncodedFields, LogprobsEncoder
from tgis.router.api.openai.answers.usage import Usage, finish_reason, make_usage, stop_reason
from tgis.router.api.openai.completions.types import Completion, CompletionChoice, CompletionRequest
from tgis.router.api.service import Result
from tgis.router.engine.handle import SequenceSpec
from tgis.router.events import Output
from tgis.router.requests.call import GenerationCall
from tgis.router.sequence import TokenDetail
from tgis.router.text.detokenizer import Vocabulary


@dataclass(frozen=True)
class CompletionJob:
    """Request, its call to the service, and the answer without its choices."""

    body: CompletionRequest
    call: GenerationCall
    header: Completion
    vocabulary: Vocabulary
    encoder: LogprobsEncoder

    @property
    def names(self) -> TokenNames:
        return TokenNames(self.vocabulary, bool(self.body.return_tokens_as_token_ids))

    @property
    def is_scored_only(self) -> bool:
        """True if the client asks for the prompt only."""
        return self.body.max_tokens == 0

    def echo(self, prompt_index: int, spec: SequenceSpec) -> str:
        """Return the prompt's text for the answer: the client's own, or the text of its token ids."""
        if not self.body.echo:
            return ""
        if self.call.inputs_are_ids or self.body.truncate_prompt_tokens:
            return spell_text(self.vocabulary, spec.input_ids)
        return self.call.texts[prompt_index]


class PromptPart(NamedTuple):
    """Part of a choice that all choices of a prompt share."""

    echo: str
    logprobs: list[EncodedFields]
    details: PromptLogprobs | None


async def describe_prompt(
    job: CompletionJob, index: int, spec: SequenceSpec, tokens: Sequence[TokenDetail]
) -> PromptPart:
    await asyncio.sleep(0)  # let other requests run between many prompts
    body = job.body
    echo = job.echo(index, spec)
    logprobs = []
    details = None
    if body.echo and body.logprobs is not None:
        # A tokenizer may add a space before a text. The space is in the tokens' text but not in the client's.
        start = len(echo) - len(spell_text(job.vocabulary, spec.input_ids))
        writer = CompletionLogprobsWriter(job.names, body.logprobs, start)
        logprobs = await job.encoder.completion(tokens, writer, are_first=True)
    if body.prompt_logprobs is not None:
        details = await job.encoder.prompt(tokens, job.names, body.prompt_logprobs)
    return PromptPart(echo, logprobs, details)


async def write_choices(job: CompletionJob, results: list[Result]) -> tuple[list[CompletionChoice], Usage]:
    """Return the choices of all prompts and the usage. If more than `n` texts per prompt were generated, the
    best `n` are chosen."""
    num_each = job.call.parameters.n
    n = job.body.n or 1
    choices: list[CompletionChoice] = []
    for index, start in enumerate(range(0, len(results), num_each)):
        siblings = results[start : start + num_each]
        prompt = await describe_prompt(job, index, siblings[0].spec, siblings[0].input_tokens)
        if n < num_each:
            siblings = sorted(siblings, key=_mean_logprob, reverse=True)[:n]
        for result in siblings:
            choices.append(await _choice(job, len(choices), prompt, result))
    firsts = results[::num_each]
    return choices, make_usage(
        sum(len(result.spec.input_ids) for result in firsts),
        0 if job.is_scored_only else sum(_last(result).num_generated for result in results),
        sum(_last(result).num_cached for result in firsts),
    )


def _mean_logprob(result: Result) -> float:
    """Return the mean log-probability of the tokens, computed from the model's own logits."""
    return sum(token.logprob for token in result.tokens) / max(len(result.tokens), 1)


def _last(result: Result) -> Output:
    assert result.last is not None, "a generation ends with an output"
    return result.last


async def _choice(job: CompletionJob, index: int, prompt: PromptPart, result: Result) -> CompletionChoice:
    body = job.body
    last = _last(result)
    tokens = [] if job.is_scored_only else result.tokens
    logprobs = None
    if body.logprobs is not None:
        writer = CompletionLogprobsWriter(job.names, body.logprobs, len(prompt.echo))
        logprobs = job.encoder.join(prompt.logprobs + await job.encoder.completion(tokens, writer))
    return CompletionChoice(
        index,
        prompt.echo + ("" if job.is_scored_only else result.text),
        logprobs,
        "length" if job.is_scored_only else finish_reason(last),
        None if job.is_scored_only else stop_reason(last, body.stop_token_ids),
        prompt.details,
        result.spec.input_ids if body.return_token_ids else None,
        [token.token_id for token in tokens] if body.return_token_ids else None,
    )
