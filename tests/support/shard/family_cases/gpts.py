"""Cases of GPT-NeoX, GPT-2, GPT-BigCode, BLOOM, Falcon, MPT and OPT, as published and as allowed by their
configurations."""

from collections.abc import Callable
from functools import partial

from transformers import (
    BloomConfig,
    FalconConfig,
    GPT2Config,
    GPTBigCodeConfig,
    GPTNeoXConfig,
    MptConfig,
    OPTConfig,
    PretrainedConfig,
)

TOKENS = {"vocab_size": 99, "bos_token_id": 1, "eos_token_id": 2}
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, **TOKENS}
LENGTH = {"max_position_embeddings": 512}
SHORT = {"n_layer": 2, "n_head": 4, **TOKENS}  # names of GPT-2 and BLOOM
SIX_HEADS = {"n_head": 6, "hidden_size": 48}
HALF_ROTARY = {"rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5}}

neox = partial(GPTNeoXConfig, intermediate_size=48, **HALF_ROTARY, **SIZES, **LENGTH)
gpt2 = partial(GPT2Config, n_embd=32, n_positions=512, **SHORT)
bigcode = partial(GPTBigCodeConfig, n_embd=32, n_positions=512, **SHORT)
bloom = partial(BloomConfig, **{"hidden_size": 32, **SHORT})
falcon = partial(FalconConfig, **SIZES, **LENGTH)
mpt = partial(MptConfig, n_layers=2, max_seq_len=512, **TOKENS)
opt = partial(OPTConfig, ffn_dim=48, **SIZES, **LENGTH)

CASES: dict[str, Callable[[], PretrainedConfig]] = {
    "gpt_neox": neox,
    "gpt_neox_sequential": partial(neox, use_parallel_residual=False, hidden_act="gelu_fast"),
    "gpt_neox_full_rotary": partial(
        neox, rope_parameters={"rope_theta": 500.0, "partial_rotary_factor": 1.0}
    ),
    "gpt_neox_no_bias": partial(neox, attention_bias=False, tie_word_embeddings=True),
    "gpt2": gpt2,
    "gpt2_wide": partial(gpt2, n_inner=48, activation_function="relu", tie_word_embeddings=False),
    "gpt2_unscaled": partial(gpt2, scale_attn_weights=False, reorder_and_upcast_attn=True),
    "gpt_bigcode": bigcode,
    "gpt_bigcode_multi_head": partial(bigcode, multi_query=False, activation_function="gelu", n_inner=48),
    "bloom": bloom,
    "bloom_six_heads": partial(bloom, tie_word_embeddings=False, **SIX_HEADS),
    "falcon_7b": falcon,
    "falcon_40b": partial(falcon, new_decoder_architecture=True, num_kv_heads=2, bias=True),
    "falcon_11b": partial(
        falcon,
        new_decoder_architecture=True,
        num_kv_heads=2,
        num_ln_in_parallel_attn=1,
        ffn_hidden_size=48,
        rope_theta=500042.0,
        tie_word_embeddings=False,
    ),
    "falcon_rw": partial(falcon, multi_query=False, parallel_attn=False, bias=True, alibi=True),
    "falcon_sequential": partial(falcon, parallel_attn=False, multi_query=False),
    "falcon_alibi": partial(falcon, alibi=True),
    "mpt": partial(mpt, d_model=32, n_heads=4),
    "mpt_six_heads": partial(mpt, d_model=48, n_heads=6, tie_word_embeddings=False),
    "mpt_clipped": partial(mpt, d_model=32, n_heads=4, attn_config={"clip_qkv": 0.5, "softmax_scale": 0.7}),
    "opt": opt,
    "opt_350m": partial(opt, do_layer_norm_before=False, word_embed_proj_dim=16),
    "opt_no_final_norm": partial(opt, _remove_final_layer_norm=True, tie_word_embeddings=False),
    "opt_no_bias": partial(opt, enable_bias=False, activation_function="gelu"),
}
