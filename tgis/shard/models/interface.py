"""Interface between the model runner and all models: a model's shape, and a step's inputs and outputs."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from tgis.errors import OperatorError
from tgis.shard.attention.interface import Attention, AttentionPlan, StepLayout
from tgis.shard.layers.lora import TokenAdapters
from tgis.shard.layers.ops import Parts
from tgis.shard.memory.kv_cache import AttentionShape


class UnsupportedModelError(OperatorError):
    """Error: the model cannot be served."""


class ConfigurationError(UnsupportedModelError):
    """Error: the configuration has a missing or invalid value, so that no engine could serve the model."""


class ModelSpec(AttentionShape, Protocol):
    @property
    def vocab_size(self) -> int: ...
    @property
    def max_positions(self) -> int:
        """Length of the longest sequence; 0 if there is no limit."""

    @property
    def is_encoder_decoder(self) -> bool: ...
    @property
    def rope_switch_len(self) -> int:
        """Length past which all positions of a sequence use other rotary frequencies; 0 if there is none."""


@dataclass(frozen=True)
class VirtualTokens:
    """Tokens of a step that have no id but embeddings of their own, learned as a soft prompt."""

    places: Tensor  # int64 [num_virtual], indices of the step's tokens
    embeddings: Tensor  # float32 [num_virtual, prompt_width]


@dataclass(frozen=True)
class StepInputs:
    """New tokens of a step's sequences, packed along one axis."""

    token_ids: Tensor  # int64 [num_tokens]
    positions: Tensor  # int64 [num_tokens]
    layout: StepLayout  # for engines that run other code
    plan: AttentionPlan  # of the attention that `Model.forward` is given
    cross: AttentionPlan | None = None  # of attention to the encoder's output
    is_long: Tensor | None = None  # bool [num_tokens], of sequences past `rope_switch_len`; None: none is
    virtual: VirtualTokens | None = None  # their `token_ids` have no meaning
    adapters: TokenAdapters | None = None


class Model(Protocol):
    """Model that computes steps. Both methods raise ProcessGroupError."""

    @property
    def spec(self) -> ModelSpec: ...

    def forward(self, inputs: StepInputs, attention: Attention) -> Tensor:
        """Write the tokens' keys and values to the cache; return the input of `logits`, [num_tokens, any]."""

    def logits(self, x: Tensor, adapters: TokenAdapters | None = None) -> Tensor:
        """Return float32 logits, [n, vocab_size], of rows of `forward`'s result, the same on every rank."""


@runtime_checkable
class AdaptableModel(Model, Protocol):
    """Model that takes virtual tokens and adapters."""

    @property
    def prompt_width(self) -> int: ...
    @property
    def parts(self) -> Parts: ...


@runtime_checkable
class EncodingModel(Model, Protocol):
    def encode(self, inputs: StepInputs, attention: Attention) -> None:
        """Compute whole encoder inputs; write cross attention's keys to the blocks of `inputs.plan`."""
