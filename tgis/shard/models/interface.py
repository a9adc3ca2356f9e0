"""Interface between the model runner and all models: a model's shape, and a step's inputs and outputs."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from tgis.errors import OperatorError
from tgis.shard.attention.interface import Attention, AttentionMetadata
from tgis.shard.layers.lora import TokenAdapters
from tgis.shard.layers.ops import Parts
from tgis.shard.memory.kv_cache import AttentionShape


class UnsupportedModelError(OperatorError):
    """Error of a model whose configuration cannot be served. The text is one line."""


class ConfigurationError(UnsupportedModelError):
    """Error of a configuration with a missing or invalid value, so that no engine could serve the model."""


class ModelSpec(AttentionShape, Protocol):
    """Shape of a model, which determines the sizes of the KV cache and of the tables."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def max_positions(self) -> int:
        """Length of the longest sequence that the model has positions for; 0 if there is no limit."""

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
    metadata: AttentionMetadata
    cross: AttentionMetadata | None = None
    """Blocks with the keys and values of the encoder's output, for encoder-decoder models."""
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
        """Return float32 logits, [n, vocab_size], the same on every rank.

        x: any rows of the result of `forward`, [n, any]. `adapters`: the adapters of these rows."""


@runtime_checkable
class AdaptableModel(Model, Protocol):
    """Model that takes virtual tokens and adapters."""

    @property
    def prompt_width(self) -> int:
        """Width of the embeddings of virtual tokens."""

    @property
    def parts(self) -> Parts:
        """Parts that the model was built from."""


@runtime_checkable
class EncodingModel(Model, Protocol):
    def encode(self, inputs: StepInputs, attention: Attention) -> None:
        """Compute whole encoder inputs and write the keys and values of cross attention to the cache.

        They go to the blocks of `inputs.metadata`, which the encoder's own layers use until then."""
