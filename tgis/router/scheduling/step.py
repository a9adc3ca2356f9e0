"""A step as the scheduler plans it and the link sends it."""

from collections.abc import Sequence as AnySequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tgis.router.sequence import Sequence


class Work(NamedTuple):
    """One sequence's part of a step: compute tokens [start, end), and sample the next one if `samples`."""

    sequence: Sequence
    row: int
    start: int
    end: int
    samples: bool
    opens: bool
    """The row is new to the shards with this step."""
    new_blocks: list[int]
    drafts: AnySequence[int] = ()
    """Guesses at the tokens from `end` on, which are computed too and become tokens where they are right."""


@dataclass(eq=False)
class Step:
    """What all shards compute at once, and what becomes free when they have answered."""

    step_id: int
    work: list[Work]
    num_decodes: int
    """Leading entries of `work` that compute a single further token; the others compute prompts."""
    num_drafts: int
    """Of those entries, all together."""
    num_encoder_tokens: int
    """Of the opened rows' encoder inputs; those are computed whole, before anything else of the step."""
    joins: bool
    """Newcomers join sequences that are running."""
    closed_rows: list[int]
    blocks_to_release: list[list[int]] = field(default_factory=list)

    @property
    def num_prompts(self) -> int:
        return len(self.work) - self.num_decodes

    @property
    def opened(self) -> list[Sequence]:
        return [work.sequence for work in self.work[self.num_decodes :] if work.opens]

    @property
    def num_prompt_tokens(self) -> int:
        """Of the encoder too."""
        prompts = self.work[self.num_decodes :]
        return self.num_encoder_tokens + sum(work.end - work.start for work in prompts)

    @property
    def num_tokens(self) -> int:
        return self.num_decodes + self.num_drafts + self.num_prompt_tokens


def make_step(
    step_id: int,
    decodes: list[Work],
    prompts: list[Work],
    newcomers: list[Work],
    joins: bool,
    closed_rows: list[int],
) -> Step:
    """Of sequences that decode, that go on with their prompts, and that begin."""
    num_encoder_tokens = sum(item.sequence.num_to_encode for item in newcomers)
    num_drafts = sum(len(item.drafts) for item in decodes)
    work = [*decodes, *prompts, *newcomers]
    return Step(step_id, work, len(decodes), num_drafts, num_encoder_tokens, joins, closed_rows)
