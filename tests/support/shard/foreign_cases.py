"""Small configurations of models that transformers' code runs."""

from collections.abc import Callable

import transformers

from tests.support.shard.checkpoints import SMALL

LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}
CASES: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "llama": lambda: transformers.LlamaConfig(**SMALL),
    # Parallel branches, partial rotary embedding, norms with biases.
    "stablelm": lambda: transformers.StableLmConfig(**SMALL, use_parallel_residual=True),
    # A window in three of four layers, no positions in the fourth, scaled logits.
    "cohere2": lambda: transformers.Cohere2Config(**{**SMALL, "num_hidden_layers": 4}, sliding_window=6),
    # The head has a bias.
    "phi": lambda: transformers.PhiConfig(**SMALL),
    # Keys are wider than values; experts.
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **{**SMALL, "num_key_value_heads": 4},
        **LATENT,
        moe_intermediate_size=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
    ),
    # Two head sizes; the last layers reuse keys and values of other layers.
    "gemma4_text": lambda: transformers.Gemma4TextConfig(
        **{**SMALL, "num_hidden_layers": 4},
        layer_types=["sliding_attention", "full_attention"] * 2,
        sliding_window=6,
        head_dim=8,
        global_head_dim=16,
        num_kv_shared_layers=2,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=99,
    ),
    # Code that reads the weights of some linear layers.
    "hunyuan_v1_moe": lambda: transformers.HunYuanMoEV1Config(
        **SMALL, head_dim=8, num_experts=4, moe_topk=[2, 2]
    ),
    # Learned positions.
    "biogpt": lambda: transformers.BioGptConfig(**{**SMALL, "max_position_embeddings": 64}),
}
