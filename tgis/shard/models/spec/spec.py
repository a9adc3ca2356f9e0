"""Specification of a decoder-only model as data."""

from dataclasses import dataclass
from typing import Literal

from tgis.shard.layers.norm import NormKind
from tgis.shard.layers.rotary import Rope

# Residual sums of a block's two branches, attention and feed-forward.
#   sequential:            x += attention(norm_1(x)); x += mlp(norm_2(x))
#   parallel:              x += attention(norm_1(x)) + mlp(norm_2(x))
#   parallel_shared_norm:  x += attention(norm_1(x)) + mlp(norm_1(x))
Residual = Literal["sequential", "parallel", "parallel_shared_norm"]
# Place of the norms of sequential branches.
#   before:  x += f(norm(x))
#   after:   x += post_norm(f(x))
#   both:    x += post_norm(f(norm(x)))
#   sum:     x = norm(x + f(x))
NormPlace = Literal["before", "after", "both", "sum"]


@dataclass(frozen=True)
class Experts:
    """Mixture of experts: a token uses a few feed-forwards, weighted by the softmax of router scores."""

    num_experts: int
    num_active: int  # experts per token
    intermediate_size: int  # width of one expert
    normalised: bool = True  # the weights of a token's experts sum to one
    dense_layers: frozenset[int] = frozenset()  # layers with an ordinary MLP instead


@dataclass(frozen=True)
class DecoderSpec:
    """Specification of a checkpoint for `Decoder`: everything but its tensors."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    norm_eps: float
    norm: NormKind = "rms"
    norm_place: NormPlace = "before"
    residual: Residual = "sequential"
    residual_scale: float = 1.0  # factor of a branch's output
    activation: str = "silu"
    gated: bool = True
    experts: Experts | None = None

    rope: Rope | None = None
    local_rope: Rope | None = None  # rotary embedding of layers with a window, if it differs
    windows: tuple[int | None, ...] = ()  # per layer, number of keys that a query sees; empty: no window
    slopes: tuple[float, ...] = ()  # per head (ALiBi)
    num_positions: int = 0  # rows of a learned table of positions
    position_offset: int = 0  # row of the first position

    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: Literal["none", "head", "whole"] = "none"  # RMS norm of queries and keys, per head or all heads
    clip_qkv: float | None = None
    attention_scale: float | None = None  # None: head_dim^-1/2
    attention_soft_cap: float | None = None

    embedding_size: int | None = None  # if it differs from hidden_size; projections convert between them
    embedding_scale: float = 1.0
    scales_virtual: bool = False  # virtual tokens were learned before the scaling, so they are scaled as well
    embedding_norm: bool = False
    final_norm: bool = True
    logit_scale: float = 1.0
    logit_soft_cap: float | None = None
    tie_embeddings: bool = False

    @property
    def intermediate_sizes(self) -> tuple[int, ...]:
        return (self.intermediate_size, *([self.experts.intermediate_size] if self.experts else []))

    @property
    def max_positions(self) -> int:
        return self.num_positions and self.num_positions - self.position_offset

    @property
    def is_encoder_decoder(self) -> bool:
        return False

    @property
    def rope_switch_len(self) -> int:
        return self.rope.switch_len if self.rope else 0

    def window(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None
