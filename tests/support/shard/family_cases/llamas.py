"""Cases of Llama and related families."""

from collections.abc import Callable
from typing import Any

import transformers as hf

from tests.support.shard.checkpoints import LLAMA3_ROPE, SMALL

FULL, SLIDING = "full_attention", "sliding_attention"
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
GEMMA3_ROPE = {
    FULL: {"rope_type": "linear", "rope_theta": 50000.0, "factor": 8.0},
    SLIDING: {"rope_type": "default", "rope_theta": 500.0},
}
VISION = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "image_size": 8,
    "patch_size": 4,
}


def sizes(**overrides: Any) -> dict[str, Any]:
    return {**SMALL, **overrides}


def hybrid(**options: Any) -> dict[str, Any]:
    mamba = {"mamba_n_heads": 8, "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_chunk_size": 8}
    others = {"shared_intermediate_size": 40, "layer_types": ["linear_attention", "full_attention"]}
    return sizes(**{**mamba, **others, **multipliers(0.3, 0.6, 3.0, 2.0), **options})


def experts(**overrides: Any) -> dict[str, Any]:
    return sizes(num_local_experts=4, num_experts_per_tok=2, **overrides)


def multipliers(attention: float, residual: float, embedding: float, logits: float) -> dict[str, float]:
    return {
        "attention_multiplier": attention,
        "residual_multiplier": residual,
        "embedding_multiplier": embedding,
        "logits_scaling": logits,
    }


def gemma(**overrides: Any) -> dict[str, Any]:
    return sizes(**{"head_dim": 8, "pad_token_id": 0, **overrides})


def gemma2(**overrides: Any) -> dict[str, Any]:
    """Return a configuration with caps that are low enough to have an effect."""
    caps = {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0}
    return gemma(**{"sliding_window": 5, "query_pre_attn_scalar": 24, **caps, **overrides})


def gemma3(**overrides: Any) -> dict[str, Any]:
    layers = [SLIDING, FULL, SLIDING]
    changes = {"num_hidden_layers": 3, "layer_types": layers, "rope_parameters": GEMMA3_ROPE}
    return gemma(**{"sliding_window": 5, "query_pre_attn_scalar": 24, **changes, **overrides})


def long_rope(original_length: int) -> dict[str, Any]:
    """Return factors of the three pairs of rotated channels. With a length of 20, sequences of the tests stay
    on one side."""
    return {
        "original_max_position_embeddings": original_length,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.75,
            "short_factor": [1.0, 1.3, 2.0],
            "long_factor": [1.5, 4.0, 9.0],
            "original_max_position_embeddings": original_length,
        },
    }


CASES: dict[str, Callable[[], hf.PretrainedConfig]] = {
    "mistral": lambda: hf.MistralConfig(**sizes(sliding_window=None, num_key_value_heads=4)),
    "mistral_window": lambda: hf.MistralConfig(**sizes(sliding_window=5, head_dim=12)),
    "mistral_tied_shared_kv_head": lambda: hf.MistralConfig(
        **sizes(num_key_value_heads=1, tie_word_embeddings=True, rope_parameters=LLAMA3_ROPE)
    ),
    "ministral": lambda: hf.MinistralConfig(
        **sizes(sliding_window=5, head_dim=8, layer_types=[FULL, SLIDING])
    ),
    "qwen2": lambda: hf.Qwen2Config(**sizes(sliding_window=5)),
    "qwen2_last_layer_window": lambda: hf.Qwen2Config(
        **sizes(use_sliding_window=True, sliding_window=5, max_window_layers=1, tie_word_embeddings=True)
    ),
    "qwen2_first_layer_window": lambda: hf.Qwen2Config(
        **sizes(use_sliding_window=True, sliding_window=3, layer_types=[SLIDING, FULL], num_key_value_heads=1)
    ),
    "qwen2_yarn": lambda: hf.Qwen2Config(**sizes(rope_parameters=YARN_ROPE, num_key_value_heads=4)),
    "qwen3": lambda: hf.Qwen3Config(**sizes(head_dim=12)),
    "qwen3_biases_window": lambda: hf.Qwen3Config(
        **sizes(
            head_dim=8, attention_bias=True, use_sliding_window=True, sliding_window=5, max_window_layers=0
        )
    ),
    "qwen3_tied_yarn": lambda: hf.Qwen3Config(
        **sizes(head_dim=8, tie_word_embeddings=True, rope_parameters=YARN_ROPE, num_key_value_heads=4)
    ),
    "granite": lambda: hf.GraniteConfig(
        **sizes(tie_word_embeddings=True, num_key_value_heads=4, **multipliers(0.2, 0.3, 7.0, 3.0))
    ),
    "granite_biases": lambda: hf.GraniteConfig(
        **sizes(attention_bias=True, mlp_bias=True, **multipliers(0.5, 1.0, 1.0, 3.0))
    ),
    "granite_shared_kv_head": lambda: hf.GraniteConfig(
        **sizes(num_key_value_heads=1, **multipliers(0.5, 1.5, 2.0, 0.7))
    ),
    "gemma": lambda: hf.GemmaConfig(**gemma(num_key_value_heads=1, head_dim=12)),
    "gemma_gelu": lambda: hf.GemmaConfig(**gemma(num_key_value_heads=4, hidden_act="gelu")),
    "gemma2": lambda: hf.Gemma2Config(**gemma2()),
    "gemma2_uncapped": lambda: hf.Gemma2Config(
        **gemma2(attn_logit_softcapping=None, final_logit_softcapping=None, num_key_value_heads=1)
    ),
    "gemma2_untied_biases_gelu": lambda: hf.Gemma2Config(
        **gemma2(
            tie_word_embeddings=False,
            attention_bias=True,
            hidden_activation="gelu",
            num_key_value_heads=4,
            layer_types=[FULL, SLIDING],
        )
    ),
    "gemma3": lambda: hf.Gemma3TextConfig(**gemma3()),
    "gemma3_capped_shared_kv_head": lambda: hf.Gemma3TextConfig(
        **gemma3(final_logit_softcapping=5.0, num_key_value_heads=1, head_dim=12)
    ),
    "gemma3_multimodal": lambda: hf.Gemma3Config(
        text_config=gemma3(), vision_config=VISION, mm_tokens_per_image=4
    ),
    "phi3": lambda: hf.Phi3Config(**sizes(pad_token_id=0, sliding_window=5, num_key_value_heads=4)),
    "phi3_tied_short": lambda: hf.Phi3Config(
        **sizes(pad_token_id=0, tie_word_embeddings=True, **long_rope(100))
    ),
    "phi3_short_and_long": lambda: hf.Phi3Config(**sizes(pad_token_id=0, **long_rope(20))),
    "olmo2": lambda: hf.Olmo2Config(**sizes()),
    "olmo2_tied_biases": lambda: hf.Olmo2Config(
        **sizes(num_key_value_heads=1, tie_word_embeddings=True, attention_bias=True)
    ),
    "olmo2_multi_head_yarn": lambda: hf.Olmo2Config(
        **sizes(num_key_value_heads=4, rope_parameters=YARN_ROPE)
    ),
    "mixtral": lambda: hf.MixtralConfig(**experts()),
    "mixtral_tied_window": lambda: hf.MixtralConfig(
        **experts(sliding_window=5, head_dim=12, num_key_value_heads=1, tie_word_embeddings=True)
    ),
    "qwen3_moe": lambda: hf.Qwen3MoeConfig(**experts(moe_intermediate_size=24, norm_topk_prob=True)),
    "qwen3_moe_some_dense": lambda: hf.Qwen3MoeConfig(
        **experts(
            num_hidden_layers=4,
            moe_intermediate_size=24,
            decoder_sparse_step=2,
            mlp_only_layers=[3],
            head_dim=12,
            tie_word_embeddings=True,
        )
    ),
    "qwen3_moe_biases_window": lambda: hf.Qwen3MoeConfig(
        **experts(moe_intermediate_size=24, attention_bias=True, use_sliding_window=True, sliding_window=5)
    ),
    "granitemoe": lambda: hf.GraniteMoeConfig(
        **experts(tie_word_embeddings=True, num_key_value_heads=4, **multipliers(0.2, 0.3, 7.0, 3.0))
    ),
    "granitemoe_biases": lambda: hf.GraniteMoeConfig(**experts(attention_bias=True)),
    "granitemoehybrid": lambda: hf.GraniteMoeHybridConfig(**hybrid(num_local_experts=0)),
    "granitemoehybrid_experts_rope_biases": lambda: hf.GraniteMoeHybridConfig(
        **hybrid(
            num_local_experts=5,
            num_experts_per_tok=2,
            position_embedding_type="rope",
            mamba_n_groups=2,
            mamba_n_heads=4,
            mamba_d_state=23,
            mamba_conv_bias=False,
            mamba_proj_bias=True,
            attention_bias=True,
            tie_word_embeddings=True,
        )
    ),
    "granitemoehybrid_attention_only": lambda: hf.GraniteMoeHybridConfig(
        **hybrid(num_local_experts=0, layer_types=["full_attention"] * 2, position_embedding_type="rope")
    ),
    "starcoder2": lambda: hf.Starcoder2Config(**sizes(sliding_window=5)),
}
