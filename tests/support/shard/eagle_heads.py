"""Tiny EAGLE heads in the layouts of their authors and of vLLM."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tests.support.shard.draft_heads import (
    PlainHead,
    States,
    attend,
    draw_layer,
    draw_norm,
    feed_forward,
    layer_config,
    rms,
)
from tests.support.shard.speculators import Heads, Tensors

NUM_TOKENS = 5


def make_eagle(
    states: States, texts: Sequence[Sequence[int]], num_layers: int = 1, is_vllm: bool = False
) -> tuple[Heads, PlainHead]:
    """Return a head and its plain model. `is_vllm` nests the layers' configuration, and writes no embedding
    but a head, which is fitted."""
    vocab_size, width = states.embedding.shape
    random = torch.Generator().manual_seed(11)
    t: Tensors = {"fc.weight": 0.1 * torch.randn(width, 2 * width, generator=random)}
    embedding = states.embedding
    if not is_vllm:
        t["fc.bias"] = torch.randn(width, generator=random)
        embedding = t["embed_tokens.weight"] = torch.randn(vocab_size, width, generator=random)
    for i in range(num_layers):
        draw_layer(t, f"layers.{i}", width, width, random)
        draw_norm(t, f"layers.{i}.post_attention_layernorm", width, random)
        if i:
            draw_norm(t, f"layers.{i}.input_layernorm", width, random)

    def advance(before: Tensor, tokens: Tensor) -> Tensor:
        x = torch.cat((embedding[tokens], before), 1) @ t["fc.weight"].T + t.get("fc.bias", torch.zeros(()))
        for i in range(num_layers):
            source = rms(x, t[f"layers.{i}.input_layernorm.weight"]) if i else x
            x = x + attend(source, t, f"layers.{i}.self_attn")
            fed = rms(x, t[f"layers.{i}.post_attention_layernorm.weight"])
            x = x + feed_forward(fed, t, f"layers.{i}.mlp")
        return x

    head = states.model.lm_head.weight.detach()
    plain = PlainHead(
        states,
        lambda inner: inner[-1],
        advance,
        lambda after: after @ t.get("lm_head.weight", head).T,
        torch.arange(vocab_size),
    )
    config: dict[str, Any] = layer_config(vocab_size, width) | {"num_hidden_layers": num_layers}
    config |= {"architectures": ["LlamaForCausalLM"], "bias": True}
    if is_vllm:
        t["lm_head.weight"] = plain.fit(texts, lambda after: after)
        config = {"architectures": ["EAGLEModel"], "model_type": "eagle", "model": config}
    return Heads(config, t, NUM_TOKENS, lambda *_: []), plain
