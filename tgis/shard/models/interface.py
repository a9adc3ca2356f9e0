"""Interface between the model runner and models: a model's shape, and a step's inputs and outputs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from tgis.errors import OperatorError
from tgis.shard.attention.interface import Attention, AttentionPlan, StepLayout
from tgis.shard.layers.lora import TokenAdapters
from tgis.shard.layers.ops import Parts, Product
from tgis.shard.memory.kv_cache import AttentionShape
from tgis.shard.memory.state_cache import StepStates
from tgis.shard.models.spec import DecoderSpec


class UnsupportedModelError(OperatorError):
    """Error: the model cannot be served."""


class ConfigurationError(UnsupportedModelError):
    """Error: the configuration has a missing or invalid value, so no engine can serve the model."""


class ModelSpec(AttentionShape, Protocol):
    @property
    def vocab_size(self) -> int: ...
    @property
    def max_positions(self) -> int:
        """Maximum length of a sequence; 0 if there is no limit."""

    @property
    def is_encoder_decoder(self) -> bool: ...
    @property
    def rope_switch_len(self) -> int:
        """Length beyond which all positions of a sequence use other rotary frequencies; 0 if they never
        change."""


@dataclass(frozen=True)
class VirtualTokens:
    """Tokens of a step that come from soft prompts: they have learned embeddings instead of ids."""

    places: Tensor  # int64 [num_virtual], indices of the step's tokens
    embeddings: Tensor  # float32 [num_virtual, prompt_width]


@dataclass(frozen=True)
class StepInputs:
    """New tokens of a step's sequences, packed along one axis."""

    token_ids: Tensor  # int64 [num_tokens]
    positions: Tensor  # int64 [num_tokens]
    layout: StepLayout  # for engines that run another library
    plan: AttentionPlan  # made by the attention that `Model.forward` receives
    cross: AttentionPlan | None = None  # for attention to the encoder's output
    is_long: Tensor | None = None  # bool [num_tokens], True if the sequence is longer than `rope_switch_len`
    virtual: VirtualTokens | None = None  # `token_ids` at their places have no meaning
    adapters: TokenAdapters | None = None
    states: StepStates | None = None  # of models with recurrent layers


class Model(Protocol):
    """Model. Both methods raise ProcessGroupError."""

    @property
    def spec(self) -> ModelSpec: ...

    def forward(self, inputs: StepInputs, attention: Attention) -> Tensor:
        """Write the tokens' keys and values to the cache. Return the input of `logits`, [num_tokens, any]."""

    def logits(self, x: Tensor, adapters: TokenAdapters | None = None) -> Tensor:
        """Return float32 logits, [n, vocab_size], for rows of `forward`'s result. All ranks return the
        same."""


@runtime_checkable
class AdaptableModel(Model, Protocol):
    """Model that supports soft prompts and LoRA adapters."""

    @property
    def prompt_width(self) -> int: ...
    @property
    def parts(self) -> Parts: ...


Taps = Mapping[int, Product]
"""Products with inner states of a model, by the number of the layer whose input they read."""
NO_TAPS: Taps = {}


@runtime_checkable
class SpeculativeModel(AdaptableModel, Protocol):
    """Model whose states a speculator reads. `logits` are the scaled scores of the final states."""

    @property
    def spec(self) -> DecoderSpec: ...

    def embed_tokens(self, token_ids: Tensor) -> Tensor:
        """Return rows of the table of embeddings, float32 [n, prompt_width]. All ranks return the same."""

    def forward_tapped(
        self, inputs: StepInputs, attention: Attention, taps: Taps
    ) -> tuple[Tensor, Tensor | None]:
        """Return the result of `forward`, and the sum of the taps' products, float32 [num_tokens, any], or
        None if there are none. All ranks return the same."""

    def final_states(self, x: Tensor, adapters: TokenAdapters | None = None) -> Tensor:
        """Return the input of the head, float32 [n, prompt_width], for rows of `forward`'s result. All ranks
        return the same."""

    def scores(self, states: Tensor, adapters: TokenAdapters | None = None) -> Tensor:
        """Return the head's float32 scores, [n, vocab_size], of final states. All ranks return the same."""


@runtime_checkable
class EncodingModel(Model, Protocol):
    def encode(self, inputs: StepInputs, attention: Attention) -> None:
        """Encode whole inputs. Write the keys and values of cross-attention to the blocks of
        `inputs.plan`."""
