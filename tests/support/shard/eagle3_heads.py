"""Tiny EAGLE-3 heads in the layouts of their authors and of vLLM."""

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


def make_eagle3(
    states: States,
    texts: Sequence[Sequence[int]],
    layers: Sequence[int] | None = None,
    draft_vocab: int | None = 250,
    is_vllm: bool = False,
) -> tuple[Heads, PlainHead]:
    """Return a head that reads the inputs of `layers`, by default those that its authors use, and its plain
    model. It knows all tokens, or the `draft_vocab` most frequent ones. `is_vllm` writes vLLM's names, an
    embedding, and keeps the norm of the state."""
    vocab_size, width = states.embedding.shape
    random = torch.Generator().manual_seed(9)
    layer = "layers.0" if is_vllm else "midlayer"
    t: Tensors = {"fc.weight": 0.2 * torch.randn(width, 3 * width, generator=random)}
    draw_layer(t, layer, width, 2 * width, random)
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        draw_norm(t, f"{layer}.{name}", width, random)
    draw_norm(t, "norm", width, random)
    embedding = states.embedding
    if is_vllm:
        embedding = t["embed_tokens.weight"] = torch.randn(vocab_size, width, generator=random)
    counts = torch.tensor([token for text in texts for token in text]).bincount(minlength=vocab_size)
    ids = counts.argsort(descending=True, stable=True)[:draft_vocab].sort().values
    if draft_vocab is not None:
        t["d2t"], t["t2d"] = ids - torch.arange(draft_vocab), torch.zeros(vocab_size, dtype=torch.bool)
        t["t2d"][ids] = True
    n = states.num_layers
    read = list(layers or (2, n // 2, n - 3))

    def advance(before: Tensor, tokens: Tensor) -> Tensor:
        normed = rms(before, t[f"{layer}.hidden_norm.weight"])
        token = rms(embedding[tokens], t[f"{layer}.input_layernorm.weight"])
        x = normed if is_vllm else before
        x = x + attend(torch.cat((token, normed), 1), t, f"{layer}.self_attn")
        fed = rms(x, t[f"{layer}.post_attention_layernorm.weight"])
        return x + feed_forward(fed, t, f"{layer}.mlp")

    def finish(after: Tensor) -> Tensor:
        return rms(after, t["norm.weight"])

    plain = PlainHead(
        states,
        lambda inner: torch.cat([inner[i] for i in read], 1) @ t["fc.weight"].T,
        advance,
        lambda after: finish(after) @ t["lm_head.weight"].T,
        ids,
    )
    t["lm_head.weight"] = plain.fit(texts, finish)
    config: dict[str, Any] = layer_config(vocab_size, width)
    config |= {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": draft_vocab}
    if is_vllm:
        config = {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "transformer_layer_config": layer_config(vocab_size, width),
            "draft_vocab_size": len(ids),
            "norm_before_residual": True,
            "eagle_aux_hidden_state_layer_ids": layers,
        }
    elif layers is not None:
        outputs = [number - 1 for number in layers]
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": outputs, "use_aux_hidden_state": True}
    return Heads(config, t, NUM_TOKENS, lambda *_: []), plain
