"""Shape of a model that transformers' own code runs."""

from dataclasses import dataclass


@dataclass(frozen=True)
class FallbackSpec:
    """Shape of the model. Every rank holds it all, so key/value heads are counted once for each rank."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int = 0
    rope_switch_len: int = 0
    is_encoder_decoder: bool = False
