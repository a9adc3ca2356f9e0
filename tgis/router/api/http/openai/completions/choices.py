"""Choices of a whole answer of `/v1/completions`, and what its streams share with it."""

from collections.abc import Sequence
from dataclasses import dataclass

from tgis.router.api.http.openai.completions.types import Completion, CompletionChoice, CompletionRequest
from tgis.router.api.http.openai.logprobs import (
    CompletionLogprobs,
    CompletionLogprobsWriter,
    PromptLogprobs,
    TokenNames,
    prompt_logprobs,
    spell_text,
)
from tgis.router.api.http.openai.usage import Usage, finish_reason, make_usage, stop_reason
from tgis.router.api.service import Result
from tgis.router.engine.handle import SequenceSpec
from tgis.router.events import Output
from tgis.router.requests.call import GenerationCall
from tgis.router.sequence import TokenDetail
from tgis.router.text.detokenizer import Vocabulary


@dataclass(frozen=True)
class CompletionJob:
    """Request, the call that it is for the service, and the answer without its choices."""

    body: CompletionRequest
    call: GenerationCall
    header: Completion
    vocabulary: Vocabulary

    @property
    def names(self) -> TokenNames:
        return TokenNames(self.vocabulary, bool(self.body.return_tokens_as_token_ids))

    @property
    def is_scored_only(self) -> bool:
        """True if the prompt is all that is asked for."""
        return self.body.max_tokens == 0

    def echo(self, prompt_index: int, spec: SequenceSpec) -> str:
        """Return the prompt's text: the client's own, or the text of its token ids."""
        if not self.body.echo:
            return ""
        if self.call.inputs_are_ids or self.body.truncate_prompt_tokens:
            return spell_text(self.vocabulary, spec.input_ids)
        return self.call.texts[prompt_index]


class ChoiceLogprobs:
    """Writer of one choice's log-probabilities, those of its echoed prompt first."""

    def __init__(self, job: CompletionJob, echo: str, spec: SequenceSpec) -> None:
        self._names, self._num_top = job.names, job.body.logprobs or 0
        self._has_echo = bool(job.body.echo)
        # A tokenizer may add a space before a text, which its tokens spell and the text lacks.
        spelled = len(spell_text(job.vocabulary, spec.input_ids)) if self._has_echo else 0
        self._prompt = CompletionLogprobsWriter(self._names, self._num_top, len(echo) - spelled)
        self._generated = CompletionLogprobsWriter(self._names, self._num_top, len(echo))

    def prompt(self, tokens: Sequence[TokenDetail]) -> CompletionLogprobs:
        return self._prompt.write(tokens if self._has_echo else (), are_first=True)

    def generated(self, tokens: Sequence[TokenDetail]) -> CompletionLogprobs:
        return self._generated.write(tokens)


def write_choices(job: CompletionJob, results: list[Result]) -> tuple[list[CompletionChoice], Usage]:
    """Return the choices of all prompts, the best `n` of each if more were generated, and the usage."""
    num_each, n = job.call.parameters.n, job.body.n or 1
    choices: list[CompletionChoice] = []
    for start in range(0, len(results), num_each):
        siblings = results[start : start + num_each]
        if n < num_each:
            siblings = sorted(siblings, key=_mean_logprob, reverse=True)[:n]
        for result in siblings:
            choices.append(_choice(job, len(choices), start // num_each, result))
    firsts = results[::num_each]
    return choices, make_usage(
        sum(len(result.spec.input_ids) for result in firsts),
        0 if job.is_scored_only else sum(_last(result).num_generated for result in results),
        sum(_last(result).num_cached for result in firsts),
    )


def _mean_logprob(result: Result) -> float:
    """Return the mean of the tokens' log-probabilities by the model's own logits."""
    return sum(token.logprob for token in result.tokens) / max(len(result.tokens), 1)


def _last(result: Result) -> Output:
    assert result.last is not None, "a generation ends with an output"
    return result.last


def _choice(job: CompletionJob, index: int, prompt_index: int, result: Result) -> CompletionChoice:
    body, last, echo = job.body, _last(result), job.echo(prompt_index, result.spec)
    tokens = [] if job.is_scored_only else result.tokens
    logprobs = None
    if body.logprobs is not None:
        writer = ChoiceLogprobs(job, echo, result.spec)
        logprobs = join(writer.prompt(result.input_tokens), writer.generated(tokens))
    return CompletionChoice(
        index,
        echo + ("" if job.is_scored_only else "".join(result.text)),
        logprobs,
        "length" if job.is_scored_only else finish_reason(last),
        None if job.is_scored_only else stop_reason(last, body.stop_token_ids),
        prompt_details(job, result.input_tokens),
        result.spec.input_ids if body.return_token_ids else None,
        [token.token_id for token in tokens] if body.return_token_ids else None,
    )


def prompt_details(job: CompletionJob, tokens: Sequence[TokenDetail]) -> PromptLogprobs | None:
    num_top = job.body.prompt_logprobs
    return None if num_top is None else prompt_logprobs(tokens, job.names, num_top)


def join(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    return CompletionLogprobs(
        first.text_offset + second.text_offset,
        first.token_logprobs + second.token_logprobs,
        first.tokens + second.tokens,
        first.top_logprobs + second.top_logprobs,
    )
