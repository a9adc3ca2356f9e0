"""Specification of an encoder-decoder model as data."""

from dataclasses import dataclass
from typing import Literal

from tgis.shard.layers.norm import NormKind


@dataclass(frozen=True)
class RelativeBias:
    """Bias learned per head and bucket of distances, added to the scores of self-attention. Buckets grow with
    the distance; all distances from `max_distance` on share one."""

    num_buckets: int
    max_distance: int
    is_per_layer: bool = False  # if false, all layers use the first layer's


@dataclass(frozen=True)
class StackSpec:
    """Specification of the layers of the encoder or of the decoder."""

    num_layers: int
    hidden_size: int
    num_heads: int
    head_dim: int
    intermediate_size: int
    norm_eps: float
    norm: NormKind
    norm_place: Literal["before", "sum"]  # values as in DecoderSpec
    activation: str
    gated: bool = False
    has_biases: bool = False  # whether all linear layers have biases
    attention_scale: float = 1.0
    relative_bias: RelativeBias | None = None
    num_positions: int = 0  # rows of a learned table of positions
    position_offset: int = 0  # row of the first position
    embedding_scale: float = 1.0
    embedding_norm: bool = False
    final_norm: bool = True

    @property
    def num_kv_heads(self) -> int:
        return self.num_heads

    @property
    def max_positions(self) -> int:
        return self.num_positions and self.num_positions - self.position_offset

    @property
    def qkv_bias(self) -> bool:
        return self.has_biases

    @property
    def out_bias(self) -> bool:
        return self.has_biases

    @property
    def mlp_bias(self) -> bool:
        return self.has_biases

    @property
    def clip_qkv(self) -> None:
        return None

    @property
    def qk_norm(self) -> Literal["none"]:
        return "none"


@dataclass(frozen=True)
class EncoderDecoderSpec:
    """Specification of a checkpoint for `EncoderDecoderModel`: everything but its tensors. Both stacks have
    the same number and size of heads, so that their keys and values fit one cache."""

    encoder: StackSpec
    decoder: StackSpec
    vocab_size: int
    logit_scale: float = 1.0
    has_head_bias: bool = False  # a checkpoint may still lack it

    @property
    def num_layers(self) -> int:
        return self.decoder.num_layers

    @property
    def num_heads(self) -> int:
        return self.decoder.num_heads

    @property
    def num_kv_heads(self) -> int:
        return self.decoder.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.decoder.head_dim

    @property
    def intermediate_sizes(self) -> tuple[int, ...]:
        return (self.encoder.intermediate_size, self.decoder.intermediate_size)

    @property
    def max_positions(self) -> int:
        return min(self.encoder.max_positions, self.decoder.max_positions)

    @property
    def is_encoder_decoder(self) -> bool:
        return True

    @property
    def rope_switch_len(self) -> int:
        return 0
