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
# The number of positions before scaling is so small that frequencies are interpolated, between channels that
# are not whole.
OSS_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 16,
}
LATENT_ROPE = {
    **YARN_ROPE,
    "original_max_position_embeddings": 16,
    "factor": 16.0,
    "mscale": 0.7,
    "mscale_all_dim": 1.3,
}
# The default share is that of the rotated channels of a query.
MISTRAL4_ROPE = {
    **LATENT_ROPE,
    "original_max_position_embeddings": 8,
    "llama_4_scaling_beta": 0.6,
    "partial_rotary_factor": 0.4,
}
VISION = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "image_size": 8,
    "patch_size": 4,
}


QWEN_VISION = {
    "depth": 1,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_heads": 1,
    "out_hidden_size": SMALL["hidden_size"],
    "patch_size": 4,
    "num_position_embeddings": 4,
}


def sizes(**overrides: Any) -> dict[str, Any]:
    return {**SMALL, **overrides}


def hybrid(**options: Any) -> dict[str, Any]:
    mamba = {"mamba_n_heads": 8, "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_chunk_size": 8}
    others = {"shared_intermediate_size": 40, "layer_types": ["linear_attention", "full_attention"]}
    return sizes(**{**mamba, **others, **multipliers(0.3, 0.6, 3.0, 2.0), **options})


def delta_net(**options: Any) -> dict[str, Any]:
    """Return a configuration with gated DeltaNet in its last layer."""
    heads = {"linear_num_value_heads": 4, "linear_num_key_heads": 2}
    widths = {"linear_key_head_dim": 12, "linear_value_head_dim": 16, "head_dim": 16}
    return sizes(**{**heads, **widths, "layer_types": [FULL, "linear_attention"], **options})


def delta_net_experts(**options: Any) -> dict[str, Any]:
    widths = {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 40}
    return delta_net(**{"num_experts": 4, "num_experts_per_tok": 2, **widths, **options})


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


def gemma4(**overrides: Any) -> dict[str, Any]:
    """Return a configuration whose layers with full attention have other heads. The last two layers read the
    keys and values of earlier ones."""
    layers = {"num_hidden_layers": 6, "layer_types": [SLIDING, FULL] * 3, "num_kv_shared_layers": 2}
    heads = {"head_dim": 8, "global_head_dim": 16, "sliding_window": 5, "final_logit_softcapping": 5.0}
    inputs = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": SMALL["vocab_size"]}
    ends = {"pad_token_id": 0, "tie_word_embeddings": True, "use_double_wide_mlp": True}
    return sizes(**{**layers, **heads, **inputs, **ends, **overrides})


def gemma4_experts(**overrides: Any) -> dict[str, Any]:
    """Return a configuration with experts, without layer inputs and shared keys and values."""
    plain = {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0}
    experts = {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24, "enable_moe_block": True}
    return gemma4(**{**plain, **experts, **overrides})


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


def glm4_moe(**overrides: Any) -> dict[str, Any]:
    changes = {"moe_intermediate_size": 24, "n_routed_experts": 8, "routed_scaling_factor": 1.7}
    layers = {"num_hidden_layers": 3, "num_nextn_predict_layers": 0, "head_dim": 8}
    return sizes(**{**layers, "num_experts_per_tok": 3, **changes, **overrides})


def without_width(config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration of a model whose MLPs are all experts."""
    return {key: value for key, value in config.items() if key != "intermediate_size"}


def latents(**overrides: Any) -> dict[str, Any]:
    """Return a configuration whose heads have queries, keys and values of different widths."""
    widths = {"kv_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10}
    changes = {"num_key_value_heads": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
    config = glm4_moe(**{**widths, "q_lora_rank": 16, **changes, **overrides})
    del config["head_dim"]
    return config


def llama4(**overrides: Any) -> dict[str, Any]:
    """Return a configuration with rotated, chunked layers before each layer with full attention."""
    chunks = {"attention_chunk_size": 5, "no_rope_layer_interval": 2, "floor_scale": 4, "attn_scale": 0.4}
    widths = {"head_dim": 8, "intermediate_size_mlp": 40}
    return experts(num_hidden_layers=4, **{**chunks, **widths, **overrides})


def ministral3(**overrides: Any) -> dict[str, Any]:
    """Return a configuration whose queries are scaled from position 8 on."""
    rope = {**YARN_ROPE, "original_max_position_embeddings": 8, "llama_4_scaling_beta": 0.6}
    return sizes(**{"head_dim": 8, "rope_parameters": rope, **overrides})


def pixtral() -> dict[str, Any]:
    return {**VISION, "model_type": "pixtral", "head_dim": 8}


CASES: dict[str, Callable[[], hf.PretrainedConfig]] = {
    "mistral": lambda: hf.MistralConfig(**sizes(sliding_window=None, num_key_value_heads=4)),
    "mistral_window": lambda: hf.MistralConfig(**sizes(sliding_window=5, head_dim=12)),
    "mistral_tied_shared_kv_head": lambda: hf.MistralConfig(
        **sizes(num_key_value_heads=1, tie_word_embeddings=True, rope_parameters=LLAMA3_ROPE)
    ),
    "ministral": lambda: hf.MinistralConfig(
        **sizes(sliding_window=5, head_dim=8, layer_types=[FULL, SLIDING])
    ),
    "ministral3": lambda: hf.Ministral3Config(**ministral3()),
    "ministral3_tied_window": lambda: hf.Ministral3Config(
        **ministral3(sliding_window=5, num_key_value_heads=1, tie_word_embeddings=True)
    ),
    "mistral3": lambda: hf.Mistral3Config(
        text_config=sizes(model_type="mistral", head_dim=12),
        vision_config=pixtral(),
        tie_word_embeddings=False,
    ),
    "mistral3_ministral3_tied": lambda: hf.Mistral3Config(
        text_config={**ministral3(tie_word_embeddings=True), "model_type": "ministral3"},
        vision_config=pixtral(),
    ),
    "mistral3_mistral4": lambda: hf.Mistral3Config(
        text_config={**latents(rope_parameters=MISTRAL4_ROPE), "model_type": "mistral4"},
        vision_config=pixtral(),
        tie_word_embeddings=False,
    ),
    "mistral4": lambda: hf.Mistral4Config(**latents(rope_parameters=dict(MISTRAL4_ROPE))),
    "mistral4_no_groups": lambda: hf.Mistral4Config(
        **latents(rope_parameters=dict(MISTRAL4_ROPE), n_group=1, first_k_dense_replace=0)
    ),
    "deepseek_v2": lambda: hf.DeepseekV2Config(**latents(q_lora_rank=None)),
    "deepseek_v2_groups_yarn": lambda: hf.DeepseekV2Config(
        **latents(topk_method="group_limited_greedy", rope_parameters=dict(LATENT_ROPE))
    ),
    "deepseek_v3": lambda: hf.DeepseekV3Config(**latents(rope_parameters=dict(LATENT_ROPE))),
    "deepseek_v3_biases_halves": lambda: hf.DeepseekV3Config(
        **latents(attention_bias=True, rope_interleave=False, n_shared_experts=2)
    ),
    "deepseek_v3_no_query_rank": lambda: hf.DeepseekV3Config(
        **latents(q_lora_rank=None, n_group=1, norm_topk_prob=False, tie_word_embeddings=True)
    ),
    "glm4_moe_lite": lambda: hf.Glm4MoeLiteConfig(**latents(n_group=1)),
    "glm4_moe_lite_dense_last": lambda: hf.Glm4MoeLiteConfig(
        **latents(mlp_layer_types=["sparse", "sparse", "dense"], kv_lora_rank=24)
    ),
    "llama4_text": lambda: hf.Llama4TextConfig(**llama4(interleave_moe_layer_step=2)),
    "llama4_text_biases_untuned": lambda: hf.Llama4TextConfig(
        **llama4(
            attention_bias=True,
            use_qk_norm=False,
            attn_temperature_tuning=False,
            num_key_value_heads=4,
            rope_parameters=LLAMA3_ROPE,
        )
    ),
    "llama4_multimodal": lambda: hf.Llama4Config(
        text_config=llama4(num_key_value_heads=1),
        vision_config={**VISION, "vision_output_dim": 8, "projector_input_dim": 8, "projector_output_dim": 8},
    ),
    "smollm3": lambda: hf.SmolLM3Config(**sizes(num_hidden_layers=4, pad_token_id=0)),
    "smollm3_untied_window": lambda: hf.SmolLM3Config(
        **sizes(
            pad_token_id=0,
            no_rope_layers=[0, 1],
            use_sliding_window=True,
            sliding_window=5,
            attention_bias=True,
            mlp_bias=True,
            tie_word_embeddings=False,
        )
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
    "granite_swa": lambda: hf.GraniteSWAConfig(
        **sizes(
            num_hidden_layers=4,
            sliding_window=5,
            layer_rope_theta=[0, 10000.0, 0.0, 500],
            **multipliers(0.2, 0.3, 7.0, 3.0),
        )
    ),
    "granite_swa_untied_shared_kv_head": lambda: hf.GraniteSWAConfig(
        **sizes(
            num_key_value_heads=1,
            sliding_window=7,
            layer_types=[SLIDING, FULL],
            tie_word_embeddings=False,
            rope_parameters=YARN_ROPE,
            layer_rope_theta=[500.0, 10000.0],
        )
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
    "gemma4_text": lambda: hf.Gemma4TextConfig(**gemma4()),
    "gemma4_text_experts": lambda: hf.Gemma4TextConfig(
        **gemma4_experts(attention_k_eq_v=True, num_global_key_value_heads=1)
    ),
    "gemma4_multimodal": lambda: hf.Gemma4Config(
        text_config=gemma4(num_key_value_heads=1, use_double_wide_mlp=False),
        vision_config={**VISION, "num_key_value_heads": 1, "head_dim": 8, "position_embedding_size": 8},
        image_token_id=1,
        video_token_id=1,
        audio_token_id=2,
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
    "olmo3": lambda: hf.Olmo3Config(**sizes(num_hidden_layers=4, sliding_window=5)),
    "olmo3_tied_yarn": lambda: hf.Olmo3Config(
        **sizes(
            sliding_window=5,
            layer_types=[FULL, SLIDING],
            rope_parameters={FULL: YARN_ROPE, SLIDING: {"rope_type": "default", "rope_theta": 10000.0}},
            num_key_value_heads=4,
            tie_word_embeddings=True,
        )
    ),
    "mixtral": lambda: hf.MixtralConfig(**experts()),
    "mixtral_tied_window": lambda: hf.MixtralConfig(
        **experts(sliding_window=5, head_dim=12, num_key_value_heads=1, tie_word_embeddings=True)
    ),
    "qwen2_moe": lambda: hf.Qwen2MoeConfig(
        **experts(moe_intermediate_size=24, num_experts=4, shared_expert_intermediate_size=40)
    ),
    "qwen2_moe_some_dense_window": lambda: hf.Qwen2MoeConfig(
        **experts(
            num_hidden_layers=3,
            moe_intermediate_size=24,
            num_experts=4,
            shared_expert_intermediate_size=24,
            mlp_only_layers=[1],
            norm_topk_prob=True,
            use_sliding_window=True,
            sliding_window=5,
            qkv_bias=False,
        )
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
    "granitemoeshared": lambda: hf.GraniteMoeSharedConfig(
        **experts(shared_intermediate_size=40, **multipliers(0.2, 0.3, 7.0, 3.0))
    ),
    "granitemoeshared_none_shared": lambda: hf.GraniteMoeSharedConfig(**experts(num_key_value_heads=1)),
    "glm4_moe": lambda: hf.Glm4MoeConfig(**glm4_moe(n_group=4, topk_group=2, use_qk_norm=True)),
    "glm4_moe_biases_one_group": lambda: hf.Glm4MoeConfig(
        **glm4_moe(
            attention_bias=True,
            first_k_dense_replace=2,
            n_shared_experts=2,
            norm_topk_prob=False,
            head_dim=16,
        )
    ),
    "granitemoe_swa_shared": lambda: hf.GraniteMoeSWAConfig(
        **experts(sliding_window=5, num_hidden_layers=3, shared_intermediate_size=24)
    ),
    "granitemoe_swa": lambda: hf.GraniteMoeSWAConfig(
        **experts(
            sliding_window=5,
            layer_types=[SLIDING, FULL],
            layer_rope_theta=[10000.0, 0],
            **multipliers(0.2, 0.3, 7.0, 3.0),
        )
    ),
    "gpt_oss": lambda: hf.GptOssConfig(
        **experts(head_dim=16, sliding_window=5, rope_parameters=OSS_ROPE, pad_token_id=0)
    ),
    "gpt_oss_shared_kv_head": lambda: hf.GptOssConfig(
        **experts(
            head_dim=8, sliding_window=7, num_key_value_heads=1, layer_types=[FULL, SLIDING], pad_token_id=0
        )
    ),
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
    "granitemoehybrid_mamba_only": lambda: hf.GraniteMoeHybridConfig(
        **hybrid(num_local_experts=0, layer_types=["linear_attention"] * 2, mamba_n_groups=2)
    ),
    "qwen3_next": lambda: hf.Qwen3NextConfig(**delta_net_experts()),
    "qwen3_next_some_dense_biases": lambda: hf.Qwen3NextConfig(
        **delta_net_experts(
            num_hidden_layers=4,
            layer_types=None,
            decoder_sparse_step=2,
            norm_topk_prob=False,
            attention_bias=True,
            linear_num_key_heads=1,
            linear_value_head_dim=10,
            linear_conv_kernel_dim=2,
            tie_word_embeddings=True,
        )
    ),
    "qwen3_5_text": lambda: hf.Qwen3_5TextConfig(**delta_net(linear_num_key_heads=4)),
    "qwen3_5_multimodal_tied": lambda: hf.Qwen3_5Config(
        text_config=delta_net(num_key_value_heads=1, tie_word_embeddings=True),
        vision_config=QWEN_VISION,
        tie_word_embeddings=True,
    ),
    "qwen3_5_moe_text": lambda: hf.Qwen3_5MoeTextConfig(**without_width(delta_net_experts())),
    "qwen3_5_moe_multimodal": lambda: hf.Qwen3_5MoeConfig(
        text_config=without_width(delta_net_experts(linear_value_head_dim=32)), vision_config=QWEN_VISION
    ),
    "starcoder2": lambda: hf.Starcoder2Config(**sizes(sliding_window=5)),
}
