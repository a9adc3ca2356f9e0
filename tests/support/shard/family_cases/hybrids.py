"""Cases of families with Mamba layers besides Granite 4."""

from collections.abc import Callable
from typing import Any

import transformers as hf

from tests.support.shard.checkpoints import SMALL

MAMBA, ATTENTION, MLP, EXPERTS = "linear_attention", "full_attention", "mlp", "moe"


def nemotron(kinds: list[str], **overrides: Any) -> dict[str, Any]:
    mamba = {"mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 16, "chunk_size": 8}
    sizes = {key: value for key, value in SMALL.items() if key != "num_hidden_layers"}
    return {**sizes, **mamba, "layers_block_type": kinds, "head_dim": 8, **overrides}


def nemotron_experts(kinds: list[str], **overrides: Any) -> dict[str, Any]:
    sizes = {"moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 40}
    chosen = {"n_routed_experts": 8, "num_experts_per_tok": 3, "routed_scaling_factor": 1.7}
    return nemotron(kinds, **{**sizes, **chosen, **overrides})


def falcon_h1(**overrides: Any) -> dict[str, Any]:
    mamba = {"mamba_d_ssm": 48, "mamba_n_heads": 8, "mamba_d_state": 16, "mamba_chunk_size": 8}
    factors = {
        "embedding_multiplier": 3.0,
        "lm_head_multiplier": 0.6,
        "key_multiplier": 0.7,
        "attention_in_multiplier": 0.9,
        "attention_out_multiplier": 1.3,
        "ssm_in_multiplier": 1.2,
        "ssm_out_multiplier": 0.8,
        "mlp_multipliers": [1.4, 0.6],
        "ssm_multipliers": [0.7, 1.6, 0.9, 1.2, 0.5],
    }
    return {**SMALL, **mamba, **factors, **overrides}


def mamba2(**overrides: Any) -> dict[str, Any]:
    mamba = {"num_heads": 8, "head_dim": 8, "n_groups": 2, "state_size": 16, "chunk_size": 8}
    kept = ("hidden_size", "num_hidden_layers", "vocab_size", "bos_token_id", "eos_token_id")
    return {**{key: SMALL[key] for key in kept}, **mamba, **overrides}


CASES: dict[str, Callable[[], hf.PretrainedConfig]] = {
    "nemotron_h": lambda: hf.NemotronHConfig(**nemotron([MAMBA, MLP, ATTENTION, MLP, MAMBA])),
    "nemotron_h_latent_experts_biases": lambda: hf.NemotronHConfig(
        **nemotron_experts(
            [MAMBA, EXPERTS, ATTENTION, EXPERTS],
            n_groups=1,
            moe_latent_size=24,
            n_group=4,
            topk_group=2,
            use_bias=True,
            mlp_bias=True,
            use_conv_bias=False,
            tie_word_embeddings=True,
        )
    ),
    "nemotron_h_experts": lambda: hf.NemotronHConfig(
        **nemotron_experts([EXPERTS, MAMBA, MLP, ATTENTION], norm_topk_prob=False, num_key_value_heads=1)
    ),
    "falcon_h1": lambda: hf.FalconH1Config(**falcon_h1()),
    "falcon_h1_norm_before_gate": lambda: hf.FalconH1Config(
        **falcon_h1(mamba_rms_norm=True, num_key_value_heads=1, tie_word_embeddings=True)
    ),
    "falcon_h1_gate_before_norm_biases": lambda: hf.FalconH1Config(
        **falcon_h1(
            mamba_rms_norm=True,
            mamba_norm_before_gate=False,
            mamba_n_groups=2,
            mamba_d_ssm=None,
            mamba_n_heads=4,
            mamba_d_state=23,
            attention_bias=True,
            mlp_bias=True,
            projectors_bias=True,
            mamba_proj_bias=True,
            mamba_conv_bias=False,
        )
    ),
    "mamba2": lambda: hf.Mamba2Config(**mamba2()),
    "mamba2_tied_biases": lambda: hf.Mamba2Config(
        **mamba2(n_groups=1, use_bias=True, use_conv_bias=False, tie_word_embeddings=True)
    ),
}
