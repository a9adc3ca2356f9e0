"""Draft heads: speculators with layers and a cache of their own. A head computes each token from its
embedding and from the state before it: the served model's, or after a draft its own."""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from torch import Tensor

from tgis.shard.attention.interface import Attention
from tgis.shard.layers.ops import Parts
from tgis.shard.layers.rotary import Rotary
from tgis.shard.models.decoder import StepContext, make_block
from tgis.shard.models.interface import ConfigurationError, SpeculativeModel, StepInputs, Taps
from tgis.shard.models.spec import DecoderSpec

# The state before a sequence's first token does not exist. Nothing reads what a head computes for it.
FIRST_KEY = 1


@runtime_checkable
class DraftHead(Protocol):
    """Decoder that is whole on every rank. All ranks propose the same."""

    @property
    def spec(self) -> DecoderSpec:
        """Specification of its layers."""

    @property
    def num_tokens(self) -> int:
        """Drafts of a row, unless the operator sets another maximum."""

    @property
    def state_size(self) -> int: ...
    @property
    def taps(self) -> Taps:
        """Taps whose sums are the served model's states; empty if these are its final states."""

    def advance(self, states: Tensor, inputs: StepInputs, attention: Attention) -> Tensor:
        """Return the states after tokens, given those before them, float32 [num_tokens, state_size], which
        are overwritten. A token has the position of the state before it."""

    def score(self, states: Tensor) -> Tensor:
        """Return the scores of the next tokens, float32 [n, any], given states that `advance` returned."""

    def choose(self, scores: Tensor) -> Tensor:
        """Return the tokens with the highest scores, int64 [n]."""


class HeadLayers:
    """Blocks of a decoder and their rotary embeddings."""

    def __init__(self, spec: DecoderSpec, parts: Parts, num_blocks: int):
        self._add = parts.kernels.add
        self._rotaries = [Rotary(rope, parts.kernels) for rope in spec.distinct_ropes]
        self._blocks = [make_block(spec, parts, layer) for layer in range(num_blocks)]

    def make_context(self, inputs: StepInputs, attention: Attention) -> StepContext:
        angles = tuple(rotary(inputs.positions) for rotary in self._rotaries)
        return StepContext(attention, inputs.plan, angles, None)

    def __call__(self, x: Tensor, inputs: StepInputs, attention: Attention) -> Tensor:
        context = self.make_context(inputs, attention)
        delta: Tensor | None = None
        for block in self._blocks:
            x, delta = block(x, delta, context)
        return x if delta is None else self._add(x, delta)


def open_embedding(parts: Parts, spec: DecoderSpec, model: SpeculativeModel) -> Callable[[Tensor], Tensor]:
    """Return the look-up of a head's own embedding, or of the model's. Raises ConfigurationError and
    WeightsError."""
    if parts.weights.has("embed.weight"):
        return parts.open_table("embed", (spec.vocab_size, spec.hidden_size)).look_up
    if model.prompt_width != spec.hidden_size:
        raise ConfigurationError(
            f"hidden_size {spec.hidden_size} differs from the model's {model.prompt_width}, and there is no "
            "embed_tokens"
        )
    return model.embed_tokens
