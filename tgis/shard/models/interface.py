"""What the engine knows of any model: its shape, and how a step goes through it."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from tgis.errors import OperatorError
from tgis.shard.attention.interface import Attention, AttentionMetadata
from tgis.shard.layers.lora import TokenAdapters
from tgis.shard.layers.ops import Parts


class UnsupportedModelError(OperatorError):
    """The model's configuration is none that we can serve; the text is one line."""


class ConfigurationError(UnsupportedModelError):
    """A value of the configuration is missing or makes no sense, so that nothing could serve the model."""


class ModelSpec(Protocol):
    """What decides the size of the cache and the tables."""

    @property
    def num_layers(self) -> int:
        """Layers that have keys and values in the cache."""

    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def max_positions(self) -> int:
        """Length of the longest sequence it has positions for; 0 where there is no end to them."""

    @property
    def is_encoder_decoder(self) -> bool: ...
    @property
    def rope_switch_len(self) -> int:
        """Length past which all positions of a sequence are turned differently; 0 where there is none."""


@dataclass(frozen=True)
class VirtualTokens:
    """Those of a step's tokens that have no id, but embeddings of their own, learned as a soft prompt."""

    places: Tensor  # int64 [num_virtual], in [num_tokens]
    embeddings: Tensor  # float32 [num_virtual, prompt_width]


@dataclass(frozen=True)
class StepInputs:
    """The new tokens of a step's sequences, packed along one axis."""

    token_ids: Tensor  # int64 [num_tokens]
    positions: Tensor  # int64 [num_tokens]
    metadata: AttentionMetadata
    cross: AttentionMetadata | None = None
    """Of encoder-decoder models: where the sequences have the keys and values of their encoder's output."""
    is_long: Tensor | None = None  # bool [num_tokens], of sequences past `rope_switch_len`; absent: none is
    virtual: VirtualTokens | None = None  # whose ids mean nothing
    adapters: TokenAdapters | None = None


class Model(Protocol):
    """Both methods raise WorldError."""

    @property
    def spec(self) -> ModelSpec: ...

    def forward(self, inputs: StepInputs, attention: Attention) -> Tensor:
        """Something for `logits`, [num_tokens, any]. Writes the tokens' keys and values to the cache."""

    def logits(self, x: Tensor, adapters: TokenAdapters | None = None) -> Tensor:
        """Any rows of what `forward` gave, [n, any], and their adapters -> float32 [n, vocab_size], the same
        on every rank."""


@runtime_checkable
class Tunable(Model, Protocol):
    """Takes virtual tokens and adapters."""

    @property
    def prompt_width(self) -> int:
        """Of the embeddings of virtual tokens."""

    @property
    def parts(self) -> Parts:
        """What the model was made from."""


@runtime_checkable
class EncoderDecoder(Model, Protocol):
    def encode(self, inputs: StepInputs, attention: Attention) -> None:
        """Computes whole encoder inputs, and writes to the blocks of `inputs.metadata` what the decoder's
        layers attend to. Until then the blocks serve the encoder's own layers."""
