"""Specifications of models: all that layers need besides the tensors."""

from dataclasses import dataclass, replace
from math import inf
from typing import ClassVar, Literal

from tgis.shard.layers.norm import NormKind
from tgis.shard.layers.rotary import Rope
from tgis.shard.layers.states import Gating
from tgis.shard.memory.kv_cache import LayerHeads

# Residual additions of a block's two branches, attention and feed-forward.
#   sequential:            x += attention(norm_1(x)); x += mlp(norm_2(x))
#   parallel:              x += attention(norm_1(x)) + mlp(norm_2(x))
#   parallel_shared_norm:  x += attention(norm_1(x)) + mlp(norm_1(x))
Residual = Literal["sequential", "parallel", "parallel_shared_norm"]
# Placement of the norms of sequential branches.
#   before:  x += f(norm(x))
#   after:   x += post_norm(f(x))
#   both:    x += post_norm(f(norm(x)))
#   sum:     x = norm(x + f(x))
NormPlace = Literal["before", "after", "both", "sum"]
# Projections besides that of queries. keys: the values are the keys before norms and rotary embedding. none:
# the layer reads the keys and values of an earlier one.
KVProjections = Literal["both", "keys", "none"]
# Branches of a layer. The mixer is attention or a recurrent layer.
Branches = Literal["both", "mixer", "feed_forward"]


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """Fields shared by all stacks of layers."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    norm_eps: float
    norm: NormKind = "rms"
    norm_place: NormPlace = "before"
    activation: str = "silu"
    gated: bool = True
    gate_scale: float = 1.0  # factor of the gate before its activation

    num_positions: int = 0  # rows of the table of learned positions; 0: no table
    position_offset: int = 0  # row of the first position

    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    # RMS norm of queries and keys: per head, per head without weights in layers with a rotary embedding, or
    # over all heads.
    qk_norm: Literal["none", "head", "bare_head", "whole"] = "none"
    value_norm: bool = False  # RMS norm of every head of values, without weights
    has_output_gate: bool = False  # the sigmoid of a projection multiplies the heads' outputs
    kv_projections: KVProjections = "both"
    clip_qkv: float | None = None
    attention_scale: float | None = None  # None: head_dim^-1/2

    first_key: int = 0  # keys at positions before it are hidden
    # Width of the input of attention, if it differs from hidden_size.
    attention_input_size: int | None = None

    embedding_scale: float = 1.0
    embedding_norm: bool = False
    final_norm: bool = True

    @property
    def num_cache_layers(self) -> int:
        return self.num_layers

    @property
    def max_positions(self) -> int:
        return self.num_positions and self.num_positions - self.position_offset

    @property
    def score_scale(self) -> float:
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale


@dataclass(frozen=True)
class Experts:
    """Mixture of experts: each token uses the few experts with the highest router probabilities."""

    num_experts: int
    num_active: int  # experts per token
    intermediate_size: int  # width of one expert
    normalised: bool = True  # scale the weights of a token's experts to sum to one
    bias: bool = False  # of the experts' layers
    router_bias: bool = False
    dense_layers: frozenset[int] = frozenset()  # layers with an ordinary MLP instead

    latent_size: int | None = None  # width of the experts' inputs and outputs, if projections convert them
    shared_size: int = 0  # width of the expert that all tokens use besides the chosen ones; 0: none
    has_shared_gate: bool = False  # a learned gate between 0 and 1 multiplies the shared expert's output

    probabilities: Literal["softmax", "sigmoid"] = "softmax"  # of the router's scores
    has_choice_bias: bool = False  # a learned bias changes which experts are chosen, not their weights
    num_groups: int = 1  # experts are chosen from the `num_active_groups` best groups
    num_active_groups: int = 1
    num_ranking: int = 2  # best experts of a group, the sum of whose probabilities ranks the group
    weight_scale: float = 1.0  # factor of the weights of the chosen experts
    scales_input: bool = False  # weights multiply the experts' inputs instead of their outputs
    has_router_norm: bool = False  # the router has a norm of its own, with a learned factor per channel
    has_expert_scales: bool = False  # a learned factor per expert multiplies its weights
    # Every layer also has an ordinary MLP. Both have norms before and after, and their outputs are added.
    beside_dense: bool = False


@dataclass(frozen=True)
class LayerShape:
    """Fields of `LayerSpec` that differ between layers of one model."""

    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    kv_projections: KVProjections = "both"


@dataclass(frozen=True)
class LayerInputs:
    """Second embedding of tokens: a vector of `width` for each layer, added to a projection of the first
    embedding. After each block, it multiplies the activations of a small gated branch."""

    width: int
    num_rows: int  # of the table
    virtual_token_id: int  # token whose vectors those of soft prompts have


@dataclass(frozen=True)
class Latent:
    """Latent attention: a token's keys and values of all heads are products with one vector, its latent. The
    latent is cached, together with channels of the key that all heads share and that are rotated. So the
    cache has one head, whose channels are the rotated ones and then the latent."""

    rank: int  # width of the latent
    rope_dim: int  # rotated channels of a head's queries and keys
    plain_dim: int  # other channels of a head's queries and keys
    value_dim: int  # channels of a head's values
    query_rank: int | None = None  # width of the vector that queries are computed from; None: no such vector
    has_adjacent_pairs: bool = True  # channels that are rotated together are adjacent in the checkpoint
    norm_eps: float = 1e-6

    @property
    def query_dim(self) -> int:
        return self.rope_dim + self.plain_dim

    @property
    def page_dim(self) -> int:
        """Numbers per token that attention reads."""
        return self.rope_dim + self.rank


@dataclass(frozen=True)
class MambaSpec:
    """Layers with Mamba 2 instead of attention, or beside it."""

    layers: frozenset[int]
    num_heads: int
    head_dim: int
    num_groups: int  # groups of heads that share two projections and a norm
    state_size: int
    kernel_size: int  # number of tokens that the convolution sees
    proj_bias: bool = False  # of the first matrix
    out_bias: bool = False
    conv_bias: bool = True
    min_step: float = 0.0
    max_step: float = inf
    gating: Gating = "before_norm"
    # Factors of the parts of the first matrix's product: gate, x, B, C and time step.
    part_scales: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0)

    @property
    def width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def group_width(self) -> int:
        return self.num_groups * self.state_size


@dataclass(frozen=True)
class DeltaNetSpec:
    """Layers with gated DeltaNet (Yang et al., "Gated Delta Networks", 2025) instead of attention."""

    layers: frozenset[int]
    num_heads: int  # heads of values, each of which has a state
    head_dim: int
    num_key_heads: int  # heads of queries and of keys, which neighbouring heads of values share
    key_dim: int
    kernel_size: int  # number of tokens that the convolution sees

    @property
    def width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def key_width(self) -> int:
        return self.num_key_heads * self.key_dim


@dataclass(frozen=True)
class SideBySide:
    """Attention and Mamba in every layer. Both read the same input, and their outputs are added. Constant
    factors multiply inputs and outputs."""

    attention_input: float = 1.0
    attention_output: float = 1.0
    mamba_input: float = 1.0
    mamba_output: float = 1.0


@dataclass(frozen=True)
class QueryScaling:
    """Factor of queries that grows with the position: 1 + beta * log(1 + floor((position + shift) / length)).
    It keeps the softmax sharp over long sequences (Nakanishi, "Scalable-Softmax Is Superior for Attention",
    2025)."""

    beta: float
    length: int
    shift: int = 0
    layers: frozenset[int] | None = None  # None: all layers


@dataclass(frozen=True, kw_only=True)
class DecoderSpec(LayerSpec):
    is_encoder_decoder: ClassVar = False

    vocab_size: int
    residual: Residual = "sequential"
    residual_scale: float = 1.0  # factor of a branch's output
    feed_forward_scale: float = 1.0  # further factor of the feed-forward's output
    branches: tuple[Branches, ...] = ()  # per layer; empty: both in all layers
    has_first_norm: bool = True  # False: the mixer of the first layer reads its input without a norm
    experts: Experts | None = None
    mamba: MambaSpec | None = None
    delta_net: DeltaNetSpec | None = None
    side_by_side: SideBySide | None = None  # if set, the layers with Mamba have attention as well

    rope: Rope | None = None
    local_rope: Rope | None = None  # rotary embedding of layers with a window, if it differs
    layer_ropes: tuple[Rope | None, ...] = ()  # rotary embedding per layer, None: none; empty: as above
    windows: tuple[int | None, ...] = ()  # keys that a query attends to, per layer; empty: no window
    chunks: tuple[int | None, ...] = ()  # length of the chunk that a query attends to, per layer
    query_scaling: QueryScaling | None = None
    slopes: tuple[float, ...] = ()  # ALiBi slope per head
    attention_soft_cap: float | None = None
    sinks: bool = False  # learned score per head of a key without a value
    latent: Latent | None = None  # if set, `num_kv_heads` is 1 and `head_dim` its `page_dim`

    layer_shapes: tuple[LayerShape, ...] = ()  # empty: all layers have the shape above
    kv_sources: tuple[int, ...] = ()  # layer whose keys and values a layer uses; empty: its own
    layer_inputs: LayerInputs | None = None
    layer_scalars: bool = False  # a learned factor per layer multiplies its output

    embedding_size: int | None = None  # if it differs from hidden_size; projections convert between them
    scales_virtual: bool = False  # soft prompts were trained before the scaling, so they are scaled as well
    logit_scale: float = 1.0
    logit_soft_cap: float | None = None
    tie_embeddings: bool = False

    @property
    def embedding_width(self) -> int:
        return self.embedding_size or self.hidden_size

    @property
    def intermediate_sizes(self) -> tuple[int, ...]:
        experts = self.experts
        sizes = (experts.intermediate_size, experts.shared_size) if experts else ()
        inputs = (self.layer_inputs.width,) if self.layer_inputs else ()
        return (self.intermediate_size, *(size for size in (*sizes, *inputs) if size))

    @property
    def layer_heads(self) -> tuple[LayerHeads, ...]:
        """Heads of the keys and values that each layer reads."""
        layers = (self.at(source) for source in self.kv_sources or range(self.num_layers))
        return tuple(LayerHeads(each.num_kv_heads, each.head_dim) for each in layers)

    def at(self, layer: int) -> "DecoderSpec":
        """Return the specification with the shape of one layer."""
        return replace(self, **vars(self.layer_shapes[layer])) if self.layer_shapes else self

    @property
    def attention_layers(self) -> list[int]:
        kept = self.delta_net or self.mamba
        recurrent = kept.layers if kept and not self.side_by_side else ()
        return [layer for layer in range(self.num_layers) if layer not in recurrent and self.mixes(layer)]

    @property
    def num_cache_layers(self) -> int:
        return len(self.attention_layers)

    @property
    def rope_switch_len(self) -> int:
        return self.rope.switch_len if self.rope else 0

    def mixes(self, layer: int) -> bool:
        """Return True if a layer has attention or a recurrent layer."""
        return not self.branches or self.branches[layer] != "feed_forward"

    def feeds_forward(self, layer: int) -> bool:
        return not self.branches or self.branches[layer] != "mixer"

    def window(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None

    def chunk(self, layer: int) -> int | None:
        return self.chunks[layer] if self.chunks else None

    def scales_queries(self, layer: int) -> bool:
        scaling = self.query_scaling
        return scaling is not None and (scaling.layers is None or layer in scaling.layers)

    def layer_rope(self, layer: int) -> Rope | None:
        if self.layer_ropes:
            return self.layer_ropes[layer]
        return self.rope if self.window(layer) is None else self.local_rope or self.rope

    @property
    def distinct_ropes(self) -> tuple[Rope, ...]:
        """Rotary embeddings of all layers, each once."""
        ropes = self.layer_ropes or (self.rope, self.local_rope)
        return tuple(dict.fromkeys(rope for rope in ropes if rope is not None))


@dataclass(frozen=True)
class RelativeBias:
    """Bias learned per head and bucket of distances, added to the scores of self-attention."""

    num_buckets: int
    max_distance: int  # this and all larger distances share one bucket
    is_per_layer: bool = False  # False: all layers use the first layer's bias


@dataclass(frozen=True, kw_only=True)
class StackSpec(LayerSpec):
    """Specification of the encoder or of the decoder. `norm_place` is "before" or "sum"."""

    relative_bias: RelativeBias | None = None


@dataclass(frozen=True)
class EncoderDecoderSpec:
    """Specification of two stacks whose heads have equal number and size, so that one cache serves both."""

    is_encoder_decoder: ClassVar = True
    rope_switch_len: ClassVar = 0

    encoder: StackSpec
    decoder: StackSpec
    vocab_size: int
    logit_scale: float = 1.0
    has_head_bias: bool = False  # optional in the checkpoint

    @property
    def num_layers(self) -> int:
        return self.decoder.num_layers

    @property
    def num_cache_layers(self) -> int:
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


Spec = DecoderSpec | EncoderDecoderSpec
