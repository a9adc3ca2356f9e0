"""Runs the forward pass of a step."""

from torch import Tensor

from tgis.shard.attention.interface import Attention
from tgis.shard.models.interface import Model
from tgis.shard.runner.batch_builder import Batch

# The model's output for the step's tokens, [num_tokens, any], and the logits of the sampled tokens, float32
# [num_sampled, vocab_size], or None if no token is sampled.
Outputs = tuple[Tensor, Tensor | None]


class Forward:
    """Forward pass of a model. The outputs are valid until the next step."""

    def __init__(self, model: Model, attention: Attention):
        self.model = model
        self.attention = attention

    def __call__(self, batch: Batch) -> Outputs:
        x = self.model.forward(batch.inputs, self.attention)
        adapters = batch.inputs.adapters
        at = batch.sampled_x
        if not len(at):
            return x, None
        if len(at) == len(x):
            return x, self.model.logits(x, adapters)
        return x, self.model.logits(x[at], adapters and adapters.take(at))
