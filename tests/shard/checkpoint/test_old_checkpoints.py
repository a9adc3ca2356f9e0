"""Check checkpoints in their published layouts, rewritten from what transformers writes today.

They lack a prefix, use old configuration keys, hold unused tensors, or follow their own code's layout."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.shard.checkpoints import write_model
from tests.support.shard.family_cases import gpts
from tests.support.shard.stepping import ALONE, compute_mixed_steps

Tensors = dict[str, Tensor]
Config = dict[str, Any]


@dataclass(frozen=True)
class Rewriting:
    """`keys` are pairs of a new key and its old name; `removed` lists keys that old configurations lack."""

    case: str
    tensors: Callable[[Tensors], Tensors] = dict
    keys: tuple[tuple[str, str], ...] = ()
    removed: tuple[str, ...] = ()
    added: tuple[tuple[str, Any], ...] = ()


def without(prefix: str, *extra: str) -> Callable[[Tensors], Tensors]:
    """Return a rewriting that strips the prefix and adds the `extra` tensors to every layer, under names with
    {i}."""

    def rewrite(tensors: Tensors) -> Tensors:
        layers = {match[1] for name in tensors if (match := re.search(r"\.(\d+)\.", name))}
        useless = {name.format(i=i): torch.full((3, 3), torch.nan) for name in extra for i in layers}
        return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()} | useless

    return rewrite


def with_head(table: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {**tensors, "lm_head.weight": tensors[table].clone()}


def as_santacoder(tensors: Tensors) -> Tensors:
    """Return GPT-BigCode tensors with queries apart from the shared key and value, all stored as [in,
    out]."""
    rewritten = {}
    for name, tensor in tensors.items():
        if ".c_attn." in name:
            rewritten[name.replace("c_attn", "q_attn")] = tensor[:32]
            rewritten[name.replace("c_attn", "kv_attn")] = tensor[32:]
        else:
            rewritten[name] = tensor
    is_linear = re.compile(r"\.(q_attn|kv_attn|c_proj|c_fc)\.weight$").search
    return {name: (x.T if is_linear(name) else x).contiguous() for name, x in rewritten.items()}


BUFFERS = ("gpt_neox.layers.{i}.attention." + name for name in ("bias", "masked_bias", "rotary_emb.inv_freq"))
GPT2_KEYS = (("n_layer", "num_hidden_layers"), ("n_head", "num_attention_heads"), ("n_embd", "hidden_size"))
RW_KEYS = (("num_hidden_layers", "n_layer"), ("num_attention_heads", "n_head"), ("num_kv_heads", "n_head_kv"))
RW_NEVER = ("new_decoder_architecture", "num_ln_in_parallel_attn", "rope_parameters", "activation")
RW_LATE = (*RW_NEVER, "ffn_hidden_size", "max_position_embeddings", "tie_word_embeddings")
FALCON_TABLE = "transformer.word_embeddings.weight"
OPT_LATE = (
    "do_layer_norm_before",
    "word_embed_proj_dim",
    "_remove_final_layer_norm",
    "enable_bias",
    "layer_norm_elementwise_affine",
)
MOSAIC_ATTENTION = {
    "alibi": True,
    "alibi_bias_max": 8,
    "attn_impl": "triton",
    "attn_pdrop": 0,
    "attn_type": "multihead_attention",
    "attn_uses_sequence_id": False,
    "clip_qkv": None,
    "prefix_lm": False,
    "qk_ln": False,
    "softmax_scale": None,
}

REWRITINGS = {
    "gpt2": Rewriting(
        "gpt2",
        without("transformer.", "h.{i}.attn.bias", "h.{i}.attn.masked_bias"),
        removed=("n_inner", "tie_word_embeddings", "scale_attn_weights", "add_cross_attention"),
        added=(("n_ctx", 512),),
    ),
    "gpt2, general keys": Rewriting("gpt2", keys=(*GPT2_KEYS, ("n_positions", "max_position_embeddings"))),
    "santacoder": Rewriting(
        "gpt_bigcode", as_santacoder, added=(("model_type", "gpt2"), ("attention_head_type", "multiquery"))
    ),
    "bloom": Rewriting(
        "bloom",
        without("transformer."),
        keys=(("hidden_size", "n_embed"), ("n_head", "num_attention_heads")),
        removed=("tie_word_embeddings",),
        added=(("n_inner", None), ("offset_alibi", 100)),
    ),
    "opt": Rewriting("opt", without("model."), removed=OPT_LATE),
    "opt, 350m": Rewriting("opt_350m", without("model."), removed=OPT_LATE[2:]),
    "gpt_neox": Rewriting(
        "gpt_neox",
        without("", *BUFFERS),
        removed=("rope_parameters", "attention_bias", "use_parallel_residual", "tie_word_embeddings"),
        added=(("rotary_pct", 0.5), ("rotary_emb_base", 10000)),
    ),
    "falcon, 7b": Rewriting(
        "falcon_7b",
        with_head(FALCON_TABLE),
        keys=RW_KEYS[:2],
        removed=RW_LATE,
        added=(("model_type", "RefinedWebModel"), ("apply_residual_connection_post_layernorm", False)),
    ),
    "falcon, 40b": Rewriting(
        "falcon_40b",
        with_head(FALCON_TABLE),
        keys=RW_KEYS,
        removed=(*RW_LATE, "multi_query"),
        added=(("model_type", "RefinedWeb"),),
    ),
    "falcon, rw": Rewriting(
        "falcon_rw",
        keys=RW_KEYS[:2],
        removed=(*RW_LATE, "parallel_attn", "multi_query"),
        added=(("model_type", "RefinedWebModel"),),
    ),
    "falcon, little said": Rewriting(
        "falcon_7b", removed=(*RW_LATE, "parallel_attn", "multi_query", "alibi", "bias")
    ),
    "mpt": Rewriting(
        "mpt",
        removed=("layer_norm_epsilon", "tie_word_embeddings"),
        added=(("attn_config", MOSAIC_ATTENTION), ("init_config", {"name": "kaiming_normal_"})),
    ),
}


def rewrite(source: Path, target: Path, rewriting: Rewriting) -> None:
    target.mkdir()
    save_file(rewriting.tensors(load_file(source / "model.safetensors")), target / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    for new, old in rewriting.keys:
        config[old] = config.pop(new)
    for key in rewriting.removed:
        del config[key]
    (target / "config.json").write_text(json.dumps({**config, **dict(rewriting.added)}))


def compute(directory: Path) -> Tensor:
    return compute_mixed_steps(ALONE, directory, torch.float32)


@pytest.mark.parametrize("name", REWRITINGS)
def test_reads_published_checkpoints(name: str, tmp_path: Path) -> None:
    rewriting = REWRITINGS[name]
    write_model(tmp_path / "new", gpts.CASES[rewriting.case]())
    rewrite(tmp_path / "new", tmp_path / "old", rewriting)
    assert torch.equal(compute(tmp_path / "old"), compute(tmp_path / "new"))


@pytest.mark.parametrize(
    ("kind", "num_kv_heads"), [("multiquery_attention", 1), ("grouped_query_attention", 2)]
)
def test_mpt_shares_keys_and_values(kind: str, num_kv_heads: int, tmp_path: Path) -> None:
    """Check MPT against a model of separate heads whose keys and values repeat."""
    group = 4 // num_kv_heads  # queries per key

    def repeat_first(copies: int) -> Callable[[Tensors], Tensors]:
        def rewrite_qkv(qkv: Tensor) -> Tensor:
            q, *others = qkv.split(32)
            first = (x.view(num_kv_heads, group, 8, 32)[:, :1] for x in others)
            return torch.cat([q, *(x.expand(-1, copies, -1, -1).reshape(-1, 32) for x in first)])

        return lambda tensors: {n: rewrite_qkv(x) if "Wqkv" in n else x for n, x in tensors.items()}

    attention = {**MOSAIC_ATTENTION, "attn_type": kind} | ({"kv_n_heads": 2} if num_kv_heads == 2 else {})
    shared = Rewriting("mpt", repeat_first(1), added=(("attn_config", attention),))
    write_model(tmp_path / "new", gpts.CASES["mpt"]())
    rewrite(tmp_path / "new", tmp_path / "shared", shared)
    rewrite(tmp_path / "new", tmp_path / "repeated", Rewriting("mpt", repeat_first(group)))
    actual, expected = compute(tmp_path / "shared"), compute(tmp_path / "repeated")
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
