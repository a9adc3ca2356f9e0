"""Configurations of Llama and related families of all ages, interpreted like transformers does."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.support.shard.checkpoints import write_model
from tests.support.shard.family_cases import llamas
from tests.support.shard.stepping import Stepper, load
from tgis.shard.models import registry
from tgis.shard.models.interface import UnsupportedModelError

Config = dict[str, Any]

# Enough for every model type; other keys have defaults.
LEAST: Config = {
    "hidden_size": 2048,
    "intermediate_size": 512,
    "num_hidden_layers": 7,
    "num_attention_heads": 32,
    "vocab_size": 100,
}
EXPERTS: Config = {"num_local_experts": 8, "num_experts_per_tok": 2}
MODEL_TYPES: dict[str, Config] = {
    "llama": {},
    "mistral": {},
    "ministral": {},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {**EXPERTS, "moe_intermediate_size": 768},
    "granite": {},
    "granite_swa": {},
    "granitemoe": EXPERTS,
    "granitemoe_swa": EXPERTS,
    "gpt_oss": EXPERTS,
    "gemma": {},
    "gemma2": {},
    "gemma3_text": {},
    "gemma4_text": {},
    "phi3": {},
    "olmo2": {},
    "olmo3": {},
    "smollm3": {},
    "ministral3": {},
    "mistral3": {"text_config": LEAST},
    "llama4_text": {},
    "llama4": {"text_config": LEAST},
    "mixtral": EXPERTS,
    "qwen2_moe": {},
    "granitemoeshared": EXPERTS,
    "glm4_moe": {},
}
FACTORS = [1.0 + 0.1 * i for i in range(24)]
# In the form of transformers 4.
PUBLISHED: dict[str, Config] = {
    "no_window": {"model_type": "mistral", "sliding_window": None, "head_dim": None},
    "unused_window": {
        "model_type": "qwen2",
        "use_sliding_window": False,
        "sliding_window": 131072,
        "max_window_layers": 3,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    },
    "last_layers_window": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 4096,
        "max_window_layers": 3,
        "rope_theta": 1000000.0,
    },
    "all_layers_window": {"model_type": "qwen3", "use_sliding_window": True, "max_window_layers": 0},
    "first_gemma": {"model_type": "gemma", "hidden_act": "gelu", "num_key_value_heads": 1, "head_dim": 256},
    "untold_activation": {"model_type": "gemma", "hidden_activation": None},
    "gemma2": {
        "model_type": "gemma2",
        "attn_logit_softcapping": None,
        "final_logit_softcapping": 20.0,
        "cache_implementation": "hybrid",
        "hidden_act": "gelu",
        "query_pre_attn_scalar": 144,
        "sliding_window_size": 4096,
    },
    "gemma3_1b": {
        "model_type": "gemma3_text",
        "num_key_value_heads": 1,
        "rope_local_base_freq": 20000,
        "rope_theta": 2000000,
        "rope_scaling": None,
        "sliding_window": 512,
        "sliding_window_pattern": 3,
    },
    "gemma3_27b": {
        "model_type": "gemma3",
        "text_config": {
            **LEAST,
            "model_type": "gemma3_text",
            "query_pre_attn_scalar": 168,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
    },
    "gemma3_4b": {
        "model_type": "gemma3",
        "text_config": {
            "model_type": "gemma3_text",
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_hidden_layers": 34,
        },
    },
    "gemma4_e2b": {
        "model_type": "gemma4",
        "text_config": {
            "model_type": "gemma4_text",
            "hidden_size": 1536,
            "intermediate_size": 6144,
            "num_hidden_layers": 35,
            "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
            "num_key_value_heads": 1,
            "num_global_key_value_heads": None,
            "num_kv_shared_layers": 20,
            "use_double_wide_mlp": True,
            "final_logit_softcapping": 30.0,
            "rope_parameters": {
                "full_attention": {
                    "partial_rotary_factor": 0.25,
                    "rope_theta": 1000000.0,
                    "rope_type": "proportional",
                },
                "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
            },
        },
    },
    "gemma4_experts": {
        "model_type": "gemma4_text",
        "attention_k_eq_v": True,
        "num_key_value_heads": 8,
        "num_global_key_value_heads": 2,
        "global_head_dim": 128,
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": True,
        "num_experts": 16,
        "top_k_experts": 4,
        "moe_intermediate_size": 704,
        "use_bidirectional_attention": "vision",
    },
    "phi3_4k": {"model_type": "phi3", "sliding_window": 2047, "rope_scaling": None, "attention_bias": False},
    "phi3_128k": {
        "model_type": "phi3",
        "max_position_embeddings": 131072,
        "original_max_position_embeddings": 4096,
        "rope_scaling": {"type": "longrope", "long_factor": FACTORS, "short_factor": FACTORS[::-1]},
        "partial_rotary_factor": 0.75,
    },
    "mixtral": {"model_type": "mixtral", **EXPERTS, "sliding_window": 4096, "rope_theta": 5e5},
    "qwen3_30b": {
        "model_type": "qwen3_moe",
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "max_window_layers": 48,
        "sliding_window": None,
        "head_dim": 128,
    },
    "some_sparse_layers": {
        "model_type": "qwen3_moe",
        **MODEL_TYPES["qwen3_moe"],
        "decoder_sparse_step": 2,
        "mlp_only_layers": [3],
        "use_sliding_window": True,
    },
    "smollm3_3b": {
        "model_type": "smollm3",
        "layer_types": ["full_attention"] * 7,
        "max_window_layers": 28,
        "no_rope_layer_interval": 4,
        "no_rope_layers": [1, 1, 1, 0, 1, 1, 1],
        "rope_scaling": None,
        "rope_theta": 5000000.0,
        "sliding_window": None,
        "use_sliding_window": False,
    },
    "smollm3_window": {
        "model_type": "smollm3",
        "no_rope_layer_interval": 3,
        "sliding_window": 512,
        "use_sliding_window": True,
    },
    "olmo3_7b": {
        "model_type": "olmo3",
        "layer_types": [*["sliding_attention"] * 3, "full_attention", *["sliding_attention"] * 3],
        "rope_scaling": {
            "attention_factor": 1.2079441541679836,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 8.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "yarn",
        },
        "rope_theta": 500000,
        "sliding_window": 4096,
    },
    "ministral3_8b": {
        "model_type": "mistral3",
        "text_config": {
            **LEAST,
            "model_type": "ministral3",
            "head_dim": 128,
            "max_position_embeddings": 262144,
            "rope_parameters": {
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "factor": 16.0,
                "llama_4_scaling_beta": 0.1,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 16384,
                "rope_theta": 1000000.0,
                "rope_type": "yarn",
                "type": "yarn",
            },
            "sliding_window": None,
        },
        "tie_word_embeddings": False,
    },
    "mistral_small_3": {
        "model_type": "mistral3",
        "text_config": {
            **LEAST,
            "model_type": "mistral",
            "head_dim": 128,
            "num_key_value_heads": 8,
            "rope_theta": 1000000000.0,
            "sliding_window": None,
        },
    },
    "llama4_scout": {
        "model_type": "llama4",
        "text_config": {
            "attention_bias": False,
            "attention_chunk_size": 8192,
            "attn_scale": 0.1,
            "attn_temperature_tuning": True,
            "floor_scale": 8192,
            "for_llm_compressor": False,
            "head_dim": 128,
            "interleave_moe_layer_step": 1,
            "intermediate_size": 8192,
            "intermediate_size_mlp": 16384,
            "model_type": "llama4_text",
            "no_rope_layers": [],
            "num_attention_heads": 40,
            "num_experts_per_tok": 1,
            "num_key_value_heads": 8,
            "num_local_experts": 16,
            "rope_scaling": {
                "factor": 16.0,
                "high_freq_factor": 1.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            },
            "use_qk_norm": True,
        },
    },
    "llama4_maverick": {
        "model_type": "llama4_text",
        "interleave_moe_layer_step": 2,
        "no_rope_layers": [1, 1, 1, 0, 1, 1, 1],
        "num_local_experts": 128,
        "use_qk_norm": False,
        "attn_temperature_tuning": False,
    },
    "qwen1.5_moe": {
        "model_type": "qwen2_moe",
        "decoder_sparse_step": 1,
        "max_window_layers": 21,
        "moe_intermediate_size": 1408,
        "num_key_value_heads": 16,
        "num_experts": 60,
        "shared_expert_intermediate_size": 5632,
        "sliding_window": 32768,
        "use_sliding_window": False,
        "rope_theta": 1000000.0,
    },
    "glm_4.5_air": {
        "model_type": "glm4_moe",
        "attention_bias": True,
        "first_k_dense_replace": 1,
        "head_dim": 128,
        "moe_intermediate_size": 1408,
        "n_group": 1,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": 8,
        "num_nextn_predict_layers": 1,
        "partial_rotary_factor": 0.5,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "routed_scaling_factor": 1.0,
        "topk_group": 1,
        "use_qk_norm": False,
    },
    "granite": {
        "model_type": "granite",
        "attention_multiplier": 0.0078125,
        "embedding_multiplier": 12.0,
        "logits_scaling": 16.0,
        "residual_multiplier": 0.22,
        "rope_theta": 10000000.0,
    },
    "gpt_oss_20b": {
        "model_type": "gpt_oss",
        "attention_bias": True,
        "experts_per_token": 4,
        "head_dim": 64,
        "hidden_act": "silu",
        "initial_context_length": 4096,
        "layer_types": ["sliding_attention", "full_attention"] * 3 + ["sliding_attention"],
        "max_position_embeddings": 131072,
        "num_experts_per_tok": 4,
        "num_key_value_heads": 8,
        "num_local_experts": 32,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
    },
    "granite_swa_bases": {"model_type": "granite_swa", "layer_rope_theta": [0, 1e4, 1e4, 1e4, 0, 5e3, 5e3]},
}


def complete(config: Config) -> Config:
    """Return the configuration with all keys that transformers derives, in its newest form."""
    return transformers.AutoConfig.for_model(**config).to_dict()


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_defaults(model_type: str) -> None:
    config = {"model_type": model_type, **LEAST, **MODEL_TYPES[model_type]}
    assert registry.make_spec(config) == registry.make_spec(complete(config))


@pytest.mark.parametrize("name", PUBLISHED)
def test_configurations_of_any_age(name: str) -> None:
    config = {**LEAST, **PUBLISHED[name]}
    assert registry.make_spec(config) == registry.make_spec(complete(config))


KINDS = ["chunked_attention", "full_attention"]
REFUSED: dict[str, Config] = {
    "swiglu_limit 5.0 of the configuration is not supported": {
        "model_type": "gpt_oss",
        **EXPERTS,
        "swiglu_limit": 5.0,
    },
    "layer_rope_theta [0, 10000.0] of the configuration is not 7 numbers, 0 or above 1": {
        "model_type": "granite_swa",
        "layer_rope_theta": [0, 1e4],
    },
    "layer_rope_theta 10000.0 of the configuration is not 7 numbers, 0 or above 1": {
        "model_type": "granite_swa",
        "layer_rope_theta": 1e4,
    },
    f"layer types {KINDS} are not supported, expected 7 of full_attention or sliding_attention": {
        "model_type": "qwen2",
        "layer_types": KINDS,
    },
    "layer types 'none' are not supported, expected 7 of full_attention or sliding_attention": {
        "model_type": "ministral",
        "layer_types": "none",
    },
    "sliding_window is missing in the model's configuration": {
        "model_type": "qwen3",
        "sliding_window": 4096,
        "layer_types": ["sliding_attention"] * 7,
    },
    "sliding_window 0 of the configuration is not a positive integer": {
        "model_type": "mistral",
        "sliding_window": 0,
    },
    "max_window_layers -1 of the configuration is not a positive integer": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "max_window_layers": -1,
    },
    "bidirectional attention is not supported": {
        "model_type": "gemma3_text",
        "use_bidirectional_attention": True,
    },
    "use_bidirectional_attention 'all' of the configuration is not supported": {
        "model_type": "gemma4_text",
        "use_bidirectional_attention": "all",
    },
    "num_kv_shared_layers leaves no layer of each kind in ['full_attention', 'sliding_attention']": {
        "model_type": "gemma4_text",
        "num_kv_shared_layers": 2,
    },
    "hidden_size in per_layer_config is not supported": {
        "model_type": "gemma4_text",
        "per_layer_config": {"1": {"hidden_size": 5}},
    },
    "layers of sliding_attention have heads of different sizes: [64, 256]": {
        "model_type": "gemma4_text",
        "per_layer_config": {"1": {"head_dim": 64}},
    },
    "layers that share keys and values have different heads": {
        "model_type": "gemma4_text",
        "layer_types": ["sliding_attention", "full_attention"] * 3 + ["full_attention"],
        "num_kv_shared_layers": 1,
        "per_layer_config": {"6": {"num_key_value_heads": 1}},
    },
    "attn_logit_softcapping is not supported for this model type": {
        "model_type": "gemma3_text",
        "attn_logit_softcapping": 50.0,
    },
    "text_config [] of the configuration is not an object": {"model_type": "gemma3", "text_config": []},
    "attn_logit_softcapping 0.0 of the configuration is not a positive number": {
        "model_type": "gemma2",
        "attn_logit_softcapping": 0.0,
    },
    "logits_scaling 0 of the configuration is not a positive number": {
        "model_type": "granite",
        "logits_scaling": 0,
    },
    "layer types ['sliding'] are not supported, expected 7 of full_attention or chunked_attention": {
        "model_type": "llama4_text",
        "layer_types": ["sliding"],
    },
    "no_rope_layers [1, 0] is not a list of 7 zeros and ones": {
        "model_type": "smollm3",
        "no_rope_layers": [1, 0],
    },
    "a rope with an attention factor is not supported for this model type": {
        "model_type": "llama4_text",
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192},
    },
    "text_config of the model type 'qwen2' is not supported": {
        "model_type": "mistral3",
        "text_config": {**LEAST, "model_type": "qwen2"},
    },
    "tokens cannot use 8 of 16 experts from 1 of 4 groups": {
        "model_type": "glm4_moe",
        "n_routed_experts": 16,
        "n_group": 4,
    },
    "tokens cannot use 9 of 8 experts": {"model_type": "mixtral", **EXPERTS, "num_experts_per_tok": 9},
    "num_local_experts is missing in the model's configuration": {
        "model_type": "granitemoe",
        "num_experts_per_tok": 2,
    },
    "mlp_only_layers 3 of the configuration is not a list": {
        "model_type": "qwen3_moe",
        **MODEL_TYPES["qwen3_moe"],
        "mlp_only_layers": 3,
    },
}


@pytest.mark.parametrize("text", REFUSED)
def test_refuses_in_one_line(text: str) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        registry.make_spec({**LEAST, **REFUSED[text]})
    assert str(caught.value) == text


def test_a_tied_checkpoint_may_have_a_separate_head(tmp_path: Path) -> None:
    write_model(tmp_path, llamas.CASES["gemma"]())
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].flip(0)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    oracle = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    ids = [5, 6, 7, 8]
    with torch.inference_mode():
        expected = oracle(torch.tensor([ids])).logits[0]
    actual = Stepper(load(tmp_path)).step({0: (ids, 0)})[0]
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
