"""Makes the conversations of a measurement from a seed, so that each load process can make its own."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from tgis.load.workload.constraints import TextRule, draw_rule
from tgis.load.workload.lengths import parse_lengths
from tgis.load.workload.prompt_files import FilePrompt, read_prompts

WORDS = (
    "time year people way day man thing woman life child world school state family student group "
    "country problem hand part place case week company system program question work night point home "
    "water room mother area money story fact month lot right study book eye job word business issue "
    "side kind head house service friend father power hour game line end member law car city name"
).split()
SHARED_TEXT = 1 << 40  # seeds of shared prefixes, apart from those of conversations


@dataclass(frozen=True)
class TokenScale:
    """Number of tokens of a text of `WORDS`, as the service counts them."""

    per_word: float = 1.3
    overhead: float = 0.0
    """Tokens of an empty prompt, such as those of a chat template."""

    def words_for(self, num_tokens: int) -> int:
        return max(1, round((num_tokens - self.overhead) / self.per_word))


@dataclass(frozen=True)
class Workload:
    """Properties of the requests."""

    seed: int = 0
    input_tokens: str = "256"
    output_tokens: str = "64"
    texts: tuple[str, ...] = ()
    """Prompts, in turn; none: random words."""
    prompt_file: str | None = None
    cuts_prompts: bool = False
    """True to let the service cut longer prompts to the drawn length, which is exact then."""
    counts_inputs: bool = False
    """True to send prompts so that the service counts their tokens."""
    prefix_tokens: int = 0
    """Length of the beginning that prompts share."""
    num_prefixes: int = 1
    turns: int = 1
    adapter_ids: tuple[str, ...] = ()
    adapter_share: float = 1.0
    soft_prompt_ids: tuple[str, ...] = ()
    soft_prompt_share: float = 1.0
    constraints: tuple[tuple[str, float], ...] = ()
    """Names of constraints, and their shares of the requests."""
    num_distinct: int = 0
    """Number of different conversations, which repeat in turn with their seeds, so that the texts can be
    compared; 0: all are different."""
    repeat_share: float = 0.0
    """Share of conversations that repeat the one before with its seed, so that the texts can be compared."""
    temperature: float | None = None
    """None: greedy."""
    sampled_share: float = 1.0
    """Share of conversations that are sampled if there is a temperature; the others are greedy."""
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float | None = None
    batch: str = "1"
    """Number of prompts of a call, like a length. All have the same maximum length of the answer."""
    unary_share: float = 0.0
    """Share of conversations that ask for whole answers instead of streams."""
    cancel_share: float = 0.0
    """Share of conversations whose client cancels the last turn in the middle, if it is a stream of one
    prompt."""
    has_token_details: bool = False
    may_end_early: bool = False


@dataclass(frozen=True)
class Turn:
    """Text of a user, and the number of tokens wanted as the answer."""

    text: str
    new_tokens: int
    max_input_tokens: int | None = None
    """Number of tokens to which the service cuts the prompt."""
    more_texts: tuple[str, ...] = ()
    """Further prompts of the same call."""


@dataclass(frozen=True)
class Conversation:
    """Requests that follow each other, each with the texts before it; usually one."""

    index: int
    turns: tuple[Turn, ...]
    seed: int
    rule: TextRule | None = None
    adapter_id: str | None = None
    soft_prompt_id: str | None = None
    repeats: int | None = None
    """Index of the conversation with the same content."""
    is_unary: bool = False
    is_sampled: bool = True
    cancel_after: int | None = None
    """Number of tokens of the last turn after which the client cancels it."""


class ConversationSource:
    """Makes the conversations of a workload by their numbers."""

    def __init__(self, workload: Workload, scale: TokenScale) -> None:
        self._workload = workload
        self._scale = scale
        self._input_lengths = parse_lengths(workload.input_tokens)
        self._output_lengths = parse_lengths(workload.output_tokens)
        self._batch_sizes = parse_lengths(workload.batch)
        self._prefixes = [self._make_prefix(index) for index in range(workload.num_prefixes)]

    def make(self, index: int) -> Conversation:
        """Return conversation number `index`."""
        before = self._repeated(index)
        made = self._make(index if before is None else before)
        return replace(made, index=index, repeats=before, cancel_after=self._draw_cancellation(made, index))

    def _repeated(self, index: int) -> int | None:
        """Return the number of the conversation that this one repeats."""
        if num_distinct := self._workload.num_distinct:
            return index % num_distinct if index >= num_distinct else None
        share = self._workload.repeat_share
        # Shares are exact: the number of repeats up to an index grows by one.
        is_repeat = index > 0 and int((index + 1) * share) > int(index * share)
        return index - 1 if is_repeat and self._repeated(index - 1) is None else None

    def _make(self, index: int) -> Conversation:
        workload = self._workload
        source = random.Random(f"{self._workload.seed} {index}")
        given = self._files[index % len(self._files)] if self._files else None
        turns = self._file_turns(given, source) if given else self._own_turns(index, source)
        turns[0] = replace(turns[0], more_texts=tuple(self._further_texts(index, turns[0], source)))
        rule = given.rule if given and given.rule else draw_rule(workload.constraints, source)
        return Conversation(
            index=index,
            turns=tuple(turns),
            seed=source.randrange(1, 2**31),
            rule=rule,
            adapter_id=_choose_id(workload.adapter_ids, workload.adapter_share, index, source),
            soft_prompt_id=_choose_id(workload.soft_prompt_ids, workload.soft_prompt_share, index, source),
            is_unary=source.random() < workload.unary_share,
            is_sampled=source.random() < workload.sampled_share,
        )

    def _draw_cancellation(self, made: Conversation, index: int) -> int | None:
        """Return after how many tokens a client cancels the last turn; None: it does not.

        It is no part of the content, so that a conversation that is repeated is not always cancelled."""
        share = self._workload.cancel_share
        last = made.turns[-1]
        if not share or made.is_unary or last.more_texts:
            return None
        source = random.Random(f"{self._workload.seed} cancellation {index}")
        return source.randrange(last.new_tokens) if source.random() < share else None

    @cached_property
    def _files(self) -> list[FilePrompt]:
        return read_prompts(Path(self._workload.prompt_file)) if self._workload.prompt_file else []

    def _file_turns(self, given: FilePrompt, source: random.Random) -> list[Turn]:
        limit = len(given.texts) if self._workload.turns == 0 else self._workload.turns
        turns = []
        for text, wanted, answer in list(zip(given.texts, given.new_tokens, given.answers, strict=True))[
            :limit
        ]:
            estimate = round(len(answer.split()) * self._scale.per_word) if answer else 0
            turns.append(Turn(text, wanted or estimate or self._output_lengths.draw(source)))
        return turns

    def _own_turns(self, index: int, source: random.Random) -> list[Turn]:
        texts = self._workload.texts
        if texts:
            return [Turn(texts[index % len(texts)], self._output_lengths.draw(source))]
        return [self._cut_turn(source)] if self._workload.cuts_prompts else self._random_turns(source)

    def _further_texts(self, index: int, turn: Turn, source: random.Random) -> Iterator[str]:
        """Yield the prompts of a call after its first, each as if it were the first one's successor."""
        for number in range(index + 1, index + self._batch_sizes.draw(source)):
            if self._files:
                yield self._files[number % len(self._files)].texts[0]
            elif turn.max_input_tokens is not None:
                yield " ".join(source.choices(WORDS, k=turn.max_input_tokens))
            else:
                yield self._own_turns(number, source)[0].text

    def _cut_turn(self, source: random.Random) -> Turn:
        """Return a prompt that is long enough, because a word has at least one token."""
        num_tokens = self._input_lengths.draw(source)
        text = " ".join(source.choices(WORDS, k=num_tokens))
        return Turn(text, self._output_lengths.draw(source), num_tokens)

    def _random_turns(self, source: random.Random) -> list[Turn]:
        turns = []
        for number in range(max(self._workload.turns, 1)):
            num_words = self._scale.words_for(self._input_lengths.draw(source))
            prefix = source.choice(self._prefixes) if number == 0 and self._workload.prefix_tokens else []
            text = " ".join([*prefix, *source.choices(WORDS, k=max(num_words - len(prefix), 1))])
            turns.append(Turn(text, self._output_lengths.draw(source)))
        return turns

    def _make_prefix(self, index: int) -> list[str]:
        source = random.Random(self._workload.seed + SHARED_TEXT + index)
        return source.choices(WORDS, k=self._scale.words_for(self._workload.prefix_tokens))


def _choose_id(ids: Sequence[str], share: float, index: int, source: random.Random) -> str | None:
    """Return one of the ids, which take turns, for a share of the conversations."""
    return ids[index % len(ids)] if ids and source.random() < share else None


def as_workload(fields: dict[str, Any]) -> Workload:
    """Return the workload of a job's JSON."""
    lists = ("texts", "adapter_ids", "soft_prompt_ids")
    pairs = tuple((str(name), float(share)) for name, share in fields["constraints"])
    return Workload(**{**fields, **{name: tuple(fields[name]) for name in lists}, "constraints": pairs})
