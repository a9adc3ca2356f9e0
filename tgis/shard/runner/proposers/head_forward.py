"""Runs the steps of a draft head."""

from torch import Tensor

from tgis.shard.attention.interface import Attention
from tgis.shard.models.interface import StepInputs
from tgis.shard.speculators.draft_head import DraftHead


class HeadForward:
    """Steps of a draft head."""

    def __init__(self, head: DraftHead, attention: Attention) -> None:
        self.head = head
        self._attention = attention

    def advance(self, states: Tensor, inputs: StepInputs) -> Tensor:
        """See `DraftHead.advance`."""
        return self.head.advance(states, inputs, self._attention)

    def choose(self, states: Tensor) -> Tensor:
        """Return the most likely next tokens, int64 [n], given states that `advance` returned."""
        return self.head.choose(self._score(states))

    def _score(self, states: Tensor) -> Tensor:
        return self.head.score(states)
