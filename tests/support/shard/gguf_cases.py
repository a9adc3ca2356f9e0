"""GGUF architectures with configurations that GGUF files can express."""

from collections.abc import Callable
from functools import partial

import transformers as hf
from transformers import PretrainedConfig

from tests.support.shard.checkpoints import LLAMA3_ROPE
from tests.support.shard.family_cases.all import CASES as ALL
from tests.support.shard.family_cases.encoder_decoders import T5
from tests.support.shard.family_cases.gpts import mpt
from tests.support.shard.family_cases.hybrids import ATTENTION, EXPERTS, MAMBA, falcon_h1, nemotron_experts
from tests.support.shard.family_cases.llamas import (
    FULL,
    LATENT_ROPE,
    SLIDING,
    YARN_ROPE,
    delta_net_experts,
    gemma2,
    gemma3,
    glm4_moe,
    latents,
    llama4,
    sizes,
)

Case = tuple[str, Callable[[], PretrainedConfig]]

GEMMA3 = {
    "num_hidden_layers": 6,
    "layer_types": [SLIDING] * 5 + [FULL],
    "query_pre_attn_scalar": 8,
    "rope_parameters": {
        FULL: {"rope_type": "linear", "rope_theta": 50000.0, "factor": 8.0},
        SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
    },
}

# Files cannot express two different factors of scores.
DEEPSEEK_ROPE = LATENT_ROPE | {"mscale": 0.7, "mscale_all_dim": 0.7}

MINISTRAL_ROPE = YARN_ROPE | {"mscale": 1.0, "mscale_all_dim": 0.7, "llama_4_scaling_beta": 0.6}

# For each case: the architecture in the file, and the configuration in transformers.
CASES: dict[str, Case] = {
    **{
        name: ("llama", ALL[f"llama_{name}"])
        for name in (
            "grouped_queries",
            "tied",
            "wide_heads",
            "biases",
            "llama3_rope",
            "linear_rope",
            "yarn_rope",
        )
    },
    "mixtral": ("llama", ALL["mixtral"]),
    "qwen2": ("qwen2", ALL["qwen2"]),
    "qwen3": ("qwen3", ALL["qwen3"]),
    "qwen3_moe": ("qwen3moe", ALL["qwen3_moe"]),
    "qwen2_moe": ("qwen2moe", ALL["qwen2_moe"]),
    "glm4_moe": ("glm4moe", ALL["glm4_moe"]),
    "glm4_moe_draft_layer": (
        "glm4moe",
        lambda: hf.Glm4MoeConfig(
            **glm4_moe(attention_bias=True, norm_topk_prob=False, num_nextn_predict_layers=1)
        ),
    ),
    "deepseek_v2": ("deepseek2", lambda: hf.DeepseekV2Config(**latents(q_lora_rank=None, n_group=1))),
    "deepseek_v2_groups": (
        "deepseek2",
        lambda: hf.DeepseekV2Config(
            **latents(topk_method="group_limited_greedy", rope_parameters=dict(DEEPSEEK_ROPE))
        ),
    ),
    "deepseek_v3": (
        "deepseek2",
        lambda: hf.DeepseekV3Config(**latents(rope_parameters=dict(DEEPSEEK_ROPE))),
    ),
    "qwen3_next": (
        "qwen3next",
        lambda: hf.Qwen3NextConfig(**delta_net_experts(num_hidden_layers=4, layer_types=None)),
    ),
    "qwen3_next_one_key_head": (
        "qwen3next",
        lambda: hf.Qwen3NextConfig(
            **delta_net_experts(layer_types=["linear_attention", FULL], linear_num_key_heads=1)
        ),
    ),
    "llama4": (
        "llama4",
        lambda: hf.Llama4TextConfig(
            **llama4(
                interleave_moe_layer_step=2,
                no_rope_layer_interval=4,
                attention_chunk_size=8192,
                floor_scale=8192,
                attn_scale=0.1,
                rope_parameters=LLAMA3_ROPE,
            )
        ),
    ),
    "ministral3": ("mistral3", ALL["ministral3"]),
    "ministral3_scaled": (
        "mistral3",
        lambda: hf.Ministral3Config(**sizes(head_dim=8, rope_parameters=MINISTRAL_ROPE)),
    ),
    "gpt_oss": ("gpt-oss", ALL["gpt_oss"]),
    "gemma": ("gemma", ALL["gemma"]),
    "gemma2": ("gemma2", lambda: hf.Gemma2Config(**gemma2(query_pre_attn_scalar=8))),
    "gemma3": ("gemma3", lambda: hf.Gemma3TextConfig(**gemma3(**GEMMA3))),
    "gemma4": ("gemma4", ALL["gemma4_text"]),
    "gemma4_experts": ("gemma4", ALL["gemma4_text_experts"]),
    "phi3": ("phi3", ALL["phi3"]),
    "phi3_short_and_long": ("phi3", ALL["phi3_short_and_long"]),
    "granite": ("granite", ALL["granite"]),
    "granitemoe": ("granitemoe", ALL["granitemoe"]),
    "granitehybrid": ("granitehybrid", ALL["granitemoehybrid"]),
    "granitehybrid_experts_rope_biases": (
        "granitehybrid",
        ALL["granitemoehybrid_experts_rope_biases"],
    ),
    "falcon_h1": ("falcon-h1", ALL["falcon_h1"]),
    "falcon_h1_gate_before_norm": (
        "falcon-h1",
        lambda: hf.FalconH1Config(
            **falcon_h1(mamba_rms_norm=True, mamba_norm_before_gate=False, mamba_n_groups=2)
        ),
    ),
    "mamba2": ("mamba2", ALL["mamba2"]),
    "mamba2_tied_biases": ("mamba2", ALL["mamba2_tied_biases"]),
    "nemotron_h": ("nemotron_h", ALL["nemotron_h"]),
    "nemotron_h_moe": (
        "nemotron_h_moe",
        lambda: hf.NemotronHConfig(**nemotron_experts([EXPERTS, MAMBA, ATTENTION, EXPERTS])),
    ),
    "nemotron_h_moe_latents": (
        "nemotron_h_moe",
        lambda: hf.NemotronHConfig(
            **nemotron_experts(
                [MAMBA, EXPERTS, ATTENTION], n_groups=1, moe_latent_size=32, norm_topk_prob=False
            )
        ),
    ),
    "olmo2": ("olmo2", ALL["olmo2"]),
    "olmo3": ("olmo2", ALL["olmo3"]),
    "smollm3": ("smollm3", ALL["smollm3"]),
    "gpt_neox": ("gptneox", ALL["gpt_neox"]),
    "gpt2": ("gpt2", ALL["gpt2"]),
    "starcoder2": ("starcoder2", ALL["starcoder2"]),
    "falcon_7b": ("falcon", ALL["falcon_7b"]),
    "falcon_40b": ("falcon", ALL["falcon_40b"]),
    "falcon_11b": ("falcon", ALL["falcon_11b"]),
    "bloom": ("bloom", ALL["bloom"]),
    "mpt": ("mpt", ALL["mpt"]),
    "mpt_clipped": ("mpt", partial(mpt, d_model=32, n_heads=4, attn_config={"clip_qkv": 0.5})),
    "t5": ("t5", lambda: hf.T5Config(**T5)),
    "flan_t5": ("t5", lambda: hf.T5Config(**T5, feed_forward_proj="gated-gelu", tie_word_embeddings=False)),
}
