"""Configurations in the form in which models are published, and with small sizes."""

import json
from pathlib import Path
from typing import Any

from tests.support.shard.checkpoints import SMALL
from tests.support.shard.family_cases.llamas import QWEN_VISION, VISION

DIRECTORY = Path(__file__).parents[2] / "data" / "published_configs"
NAMES = tuple(sorted(path.stem for path in DIRECTORY.iterdir()))
NUM_LAYERS = 6
# Sizes that replace those of the same keys. Windows, chunks and lengths are shorter than prompts of tests.
SIZES = {
    **{key: SMALL[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")},
    "intermediate_size_mlp": 40,
    "head_dim": 16,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 16,
    "num_experts_per_tok": 2,
    "top_k_experts": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
    "moe_shared_expert_intermediate_size": 40,
    "shared_intermediate_size": 40,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "sliding_window": 5,
    "attention_chunk_size": 5,
    "floor_scale": 4,
    "kv_lora_rank": 20,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "mamba_d_head": 8,
    "mamba_n_heads": 8,
    "mamba_d_state": 16,
    "mamba_chunk_size": 8,
    "mamba_d_ssm": 64,
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "num_heads": 8,
    "n_groups": 2,
    "ssm_state_size": 16,
    "state_size": 16,
    "chunk_size": 8,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": SMALL["vocab_size"],
    "num_kv_shared_layers": 1,
    "original_max_position_embeddings": 16,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
VISION_PARTS: dict[str, dict[str, Any]] = {
    "pixtral": {**VISION, "head_dim": 8},
    "llama4_vision_model": {
        **VISION,
        "vision_output_dim": 8,
        "projector_input_dim": 8,
        "projector_output_dim": 8,
    },
    "gemma4_vision": {**VISION, "num_key_value_heads": 1, "head_dim": 8, "position_embedding_size": 8},
    "qwen3_5": QWEN_VISION,
}


def read_published(name: str) -> dict[str, Any]:
    return json.loads((DIRECTORY / f"{name}.json").read_text())


def shrink(config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration with small sizes and without quantization. It keeps all keys and forms."""
    kept = {key: value for key, value in config.items() if key not in ("quantization_config", "auto_map")}
    if "text_config" in config:
        ids = {key: 1 for key in kept if key.endswith(("token_id", "token_index"))}
        vision = VISION_PARTS[config["vision_config"]["model_type"]]
        vision = {**vision, "model_type": config["vision_config"]["model_type"]}
        return {**kept, **ids, "text_config": shrink(config["text_config"]), "vision_config": vision}
    return {key: _shrink_value(key, value, config) for key, value in kept.items()}


def _shrink_value(key: str, value: Any, config: dict[str, Any]) -> Any:
    if isinstance(value, dict):
        return {name: _shrink_value(name, part, config) for name, part in value.items()}
    match key:
        case "head_dim" if config["model_type"] == "mamba2":
            return SIZES["mamba_head_dim"]
        case "attention_head_dim":  # transformers does not read it
            return value
        case "num_hidden_layers":
            return min(value, NUM_LAYERS)
        case "num_key_value_heads":
            return 4 if config.get("kv_lora_rank") else min(value, 2)
        case "n_group" | "topk_group":
            return {1: 1, 8: 4}.get(value, 2)
        case "layer_types":
            return [*value[: NUM_LAYERS - 1], value[-1]]
        case "no_rope_layers" | "hybrid_override_pattern":
            return value[: min(NUM_LAYERS, config["num_hidden_layers"])]
    return SIZES[key] if value and key in SIZES else value
