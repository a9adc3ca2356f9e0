"""Runs the forward pass of a step."""

from typing import NamedTuple

from torch import Tensor

from tgis.shard.attention.interface import Attention
from tgis.shard.models.interface import NO_TAPS, Model, SpeculativeModel, StepInputs, Taps
from tgis.shard.runner.batch_builder import Batch


class Outputs(NamedTuple):
    """Outputs of a step."""

    x: Tensor  # the model's output for the step's tokens, [num_tokens, any]
    logits: Tensor | None  # of the sampled tokens, float32 [num_sampled, vocab_size]; None if there are none
    # Sum of the taps' products, float32 [num_tokens, any]. On a device: the states that a speculator reads.
    tapped: Tensor | None = None


class Forward:
    """Forward pass of a model. The outputs are valid until the next step."""

    def __init__(self, model: Model, attention: Attention, taps: Taps = NO_TAPS):
        self.model = model
        self.attention = attention
        self.taps = taps

    def __call__(self, batch: Batch, is_tapped: bool = True) -> Outputs:
        """Compute a step. Without `is_tapped`, the taps are left out."""
        x, tapped = self.run_layers(batch.inputs, self.taps if is_tapped else NO_TAPS)
        adapters = batch.inputs.adapters
        at = batch.sampled_x
        if not len(at):
            return Outputs(x, None, tapped)
        if len(at) == len(x):
            return Outputs(x, self.model.logits(x, adapters), tapped)
        return Outputs(x, self.model.logits(x[at], adapters and adapters.take(at)), tapped)

    def run_layers(self, inputs: StepInputs, taps: Taps) -> tuple[Tensor, Tensor | None]:
        if not taps:
            return self.model.forward(inputs, self.attention), None
        assert isinstance(self.model, SpeculativeModel), "other models have no taps"
        return self.model.forward_tapped(inputs, self.attention, taps)
