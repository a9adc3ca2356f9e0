"""Step: a unit of work that the scheduler plans and the shard client sends."""

from collections.abc import Sequence as AnySequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tgis.router.sequence import Sequence


class Drafts(NamedTuple):
    """Drafts of a sequence's next tokens: token ids, or a number that the shards may propose themselves."""

    token_ids: AnySequence[int] = ()
    max_proposed: int = 0
    """Most drafts that the shards may propose; 0 if there are token ids."""

    @property
    def most(self) -> int:
        """Most tokens that a step computes for them."""
        return len(self.token_ids) + self.max_proposed


NO_DRAFTS = Drafts()


class WorkItem(NamedTuple):
    """One sequence's part of a step: compute tokens [start, end), and sample the next one if `samples`."""

    sequence: Sequence
    row: int
    start: int
    end: int
    samples: bool
    opens: bool
    """True if this step opens the row in the shards."""
    new_blocks: AnySequence[int]
    drafts: Drafts = NO_DRAFTS
    """Drafts from `end` on. The step computes them too, and those that are right become tokens."""


@dataclass(eq=False)
class Step:
    """Work that all shards compute at once, and blocks that become free when all of them have answered."""

    step_id: int
    work: list[WorkItem]
    num_decodes: int
    """Leading entries of `work` that compute a single further token; the others compute prompts."""
    num_drafts: int
    """Draft tokens of the router."""
    max_proposed: int
    """Most drafts that the shards may propose beside those."""
    num_encoder_tokens: int
    """Encoder tokens of the opened rows, which are computed whole, before anything else of the step."""
    joins: bool
    """True if newcomers join sequences that are already running."""
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
        """Number of prompt tokens, with encoder tokens."""
        prompts = self.work[self.num_decodes :]
        return self.num_encoder_tokens + sum(work.end - work.start for work in prompts)

    @property
    def num_tokens(self) -> int:
        """Number of tokens to compute, the most if the shards may propose drafts."""
        return self.num_decodes + self.num_drafts + self.max_proposed + self.num_prompt_tokens
