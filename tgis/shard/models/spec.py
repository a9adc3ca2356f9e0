"""What a decoder-only family is, as data."""

from dataclasses import dataclass

from tgis.shard.layers.rotary import Rope


@dataclass(frozen=True)
class DecoderSpec:
    """Everything `Decoder` needs to know of a checkpoint beside its tensors."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    norm_eps: float
    activation: str
    rope: Rope
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    tie_embeddings: bool = False
    rope_switch_len: int = 0
