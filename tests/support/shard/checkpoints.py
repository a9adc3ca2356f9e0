"""Tiny random checkpoints written by transformers, whose names and shapes on disk must be readable."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 99,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

transformers.utils.logging.disable_progress_bar()

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}

# Differences from SMALL. Each can be split over two ranks; with `shared_kv_head`, both share the only KV
# head.
CASES: dict[str, dict[str, Any]] = {
    "grouped_queries": {},
    "tied": {"tie_word_embeddings": True},
    "multi_head": {"num_key_value_heads": 4},
    "shared_kv_head": {"num_key_value_heads": 1},
    "wide_heads": {"head_dim": 20},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "llama3_rope": {"rope_parameters": LLAMA3_ROPE},
    "linear_rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 3.0}},
    "yarn_rope": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
        }
    },
}


def write_llama(directory: Path, **overrides: Any) -> transformers.LlamaConfig:
    """Write a Llama model with random weights whose logits have clear gaps. `overrides` are options of
    LlamaConfig; `dtype` is the stored type, float32 by default."""
    dtype = overrides.pop("dtype", torch.float32)
    config = transformers.LlamaConfig(**{**SMALL, **overrides})
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    randomise(model)
    model.to(dtype).save_pretrained(directory)
    return config


def randomise(model: nn.Module) -> None:
    """Randomize initial values: norms around one, all others around zero."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            centre = 1.0 if "norm" in name or "ln_" in name or name.endswith((".D", ".A_log")) else 0.0
            parameter.copy_(torch.randn_like(parameter) * 0.2 + centre)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn_like(buffer) * 0.2)
            if name.endswith("layer_scalar"):
                buffer.copy_(torch.rand_like(buffer) + 0.5)


def write_model(directory: Path, config: transformers.PretrainedConfig) -> None:
    """Write a model with random float32 weights."""
    torch.manual_seed(0)
    model = find_auto_class(config).from_config(config, dtype=torch.float32)
    randomise(model)
    model.save_pretrained(directory)


def find_auto_class(config: transformers.PretrainedConfig) -> Any:
    """Return the class of transformers that makes and loads a model that generates text."""
    if config.is_encoder_decoder:
        return transformers.AutoModelForSeq2SeqLM
    has_images = config.model_type in ("mistral3", "mistral4", "llama4", "gemma4", "qwen3_5", "qwen3_5_moe")
    return transformers.AutoModelForImageTextToText if has_images else transformers.AutoModelForCausalLM


def edit_config(directory: Path, config: dict[str, Any]) -> None:
    (directory / "config.json").write_text(json.dumps(config))
