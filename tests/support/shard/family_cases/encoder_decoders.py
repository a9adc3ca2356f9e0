"""Cases of encoder-decoder families."""

from collections.abc import Callable

from transformers import BartConfig, MBartConfig, MT5Config, PretrainedConfig, T5Config, UMT5Config

T5 = {
    "vocab_size": 99,
    "d_model": 32,
    "d_kv": 12,
    "d_ff": 48,
    "num_layers": 3,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
BART = {
    "vocab_size": 99,
    "d_model": 32,
    "encoder_layers": 3,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 40,
    "max_position_embeddings": 256,
    "decoder_start_token_id": 2,
}

CASES: dict[str, Callable[[], PretrainedConfig]] = {
    "t5": lambda: T5Config(**T5),
    "flan_t5": lambda: T5Config(**T5, feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    "ul2": lambda: T5Config(**T5, feed_forward_proj="gated-silu", relative_attention_max_distance=40),
    "mt5": lambda: MT5Config(**T5, relative_attention_num_buckets=8),
    "umt5": lambda: UMT5Config(**T5),
    "bart": lambda: BartConfig(**BART),
    "bart_scaled": lambda: BartConfig(**BART, scale_embedding=True, activation_function="relu"),
    "mbart": lambda: MBartConfig(**BART, scale_embedding=True),
}
