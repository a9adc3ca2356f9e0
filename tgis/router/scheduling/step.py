"""Step: the unit of work that the scheduler plans and the shard client sends."""

from collections.abc import Sequence as AnySequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tgis.router.sequence import Sequence


class Drafts(NamedTuple):
    """Drafts of a sequence's next tokens: token ids, or a maximum number for the shards to propose."""

    token_ids: AnySequence[int] = ()
    max_proposed: int = 0
    """Maximum number of drafts that the shards may propose; 0 if there are token ids."""
    waits: bool = False
    """True if the sequence waits until all its tokens are answered, even without drafts. Otherwise, every
    second step would have only the sequences without drafts."""

    @property
    def max_tokens(self) -> int:
        """Maximum number of tokens that a step computes for the drafts."""
        return len(self.token_ids) + self.max_proposed


NO_DRAFTS = Drafts()


class DraftResult(NamedTuple):
    """Numbers of a sequence's drafts in an answered step."""

    sequence: Sequence
    num_drafts: int
    num_accepted: int


class WorkItem(NamedTuple):
    """One sequence's part of a step: compute the tokens [start, end), and sample the next token if
    `samples`."""

    sequence: Sequence
    row: int
    start: int
    end: int
    samples: bool
    opens: bool
    """True if this step opens the row in the shards."""
    new_blocks: AnySequence[int]
    drafts: Drafts = NO_DRAFTS
    """Drafts from `end` on. The step computes them too, and correct drafts become tokens."""
    state_save: int | None = None
    """Slot to which the state after `end` is copied."""


@dataclass(eq=False)
class Step:
    """Work for all shards, and blocks that become free when all shards have answered."""

    step_id: int
    work: list[WorkItem]
    num_decodes: int
    """Number of leading items of `work` that compute a single token; the others compute prompts."""
    num_drafts: int
    """Number of draft tokens from the router."""
    max_proposed: int
    """Maximum number of additional drafts that the shards may propose."""
    num_encoder_tokens: int
    """Number of encoder tokens of the opened rows, which the step computes first and as a whole."""
    joins: bool
    """True if newly admitted sequences join running ones."""
    closed_rows: list[int]
    num_followed: int = 0
    """Number of sequences that the shards' speculator follows."""
    blocks_to_release: list[list[int]] = field(default_factory=list)

    @property
    def num_prompts(self) -> int:
        return len(self.work) - self.num_decodes

    @property
    def opened(self) -> list[Sequence]:
        return [work.sequence for work in self.work[self.num_decodes :] if work.opens]

    @property
    def num_prompt_tokens(self) -> int:
        """Number of prompt tokens, including encoder tokens."""
        prompts = self.work[self.num_decodes :]
        return self.num_encoder_tokens + sum(work.end - work.start for work in prompts)

    @property
    def num_tokens(self) -> int:
        """Number of tokens to compute; the maximum if the shards may propose drafts."""
        return self.num_decodes + self.num_drafts + self.max_proposed + self.num_prompt_tokens
