"""Trains an EAGLE-3 head as its authors do: each of several passes reads the outputs of the one before, as
the head does when it drafts."""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.speculator_files import cross_entropy, report, write

NUM_PASSES = 3
CONTEXT = 64  # tokens of a prompt that are trained on
NUM_TEXTS = 6  # of a step
LEARNING_RATE = 1e-3
EPS = 1e-5
THETA = 10000.0


@dataclass(frozen=True)
class TappedText:
    """Tokens of a text, with the model's states and the inner ones that the head reads."""

    token_ids: Tensor  # int64 [num_tokens]
    inner: Tensor  # float16 [num_tokens, 3 * width]
    states: Tensor  # float16 [num_tokens, width]
    prompt_len: int

    def crop(self) -> "TappedText":
        first = max(self.prompt_len - CONTEXT, 0)
        return TappedText(
            self.token_ids[first:], self.inner[first:], self.states[first:], self.prompt_len - first
        )


@dataclass(frozen=True)
class TextBatch:
    """Texts, padded at their ends. Place i has the states of token i and token i + 1; the head predicts token
    i + 2 there, which the model predicts from its state of token i + 1."""

    inner: Tensor  # float32 [n, num_places, 3 * width]
    token_ids: Tensor  # int64 [n, num_places]
    states: Tensor  # float32 [n, num_places, width], of the model
    counts: Tensor  # bool [n, num_places], False in prompts and after ends

    @classmethod
    def of(cls, texts: Sequence[TappedText]) -> "TextBatch":
        length = max(len(text.token_ids) for text in texts)
        ids, inner, states, counts = [], [], [], []
        for text in texts:
            missing = length - len(text.token_ids)
            ids.append(F.pad(text.token_ids[1:-1], (0, missing)))
            inner.append(F.pad(text.inner[:-2].float(), (0, 0, 0, missing)))
            states.append(F.pad(text.states[1:-1].float(), (0, 0, 0, missing)))
            places = torch.arange(length - 2)
            counts.append((places >= text.prompt_len - 2) & (places < len(text.token_ids) - 2))
        return cls(*map(torch.stack, (inner, ids, states, counts)))


class Eagle3Head(nn.Module):
    """Trainable head, with the sizes of the model's layers. `embedding` has all tokens, `head` the known
    ones."""

    def __init__(
        self, sizes: dict[str, Any], embedding: Tensor, head: Tensor, known: Tensor, layers: list[int]
    ):
        super().__init__()
        self.sizes, self.known, self.layers, self.embedding = sizes, known, layers, embedding
        width, dim = sizes["hidden_size"], sizes["head_dim"]
        heads, kv_heads = sizes["num_attention_heads"], sizes["num_key_value_heads"]
        shapes = {
            "fc": (width, 3 * width),
            "midlayer.self_attn.q_proj": (heads * dim, 2 * width),
            "midlayer.self_attn.k_proj": (kv_heads * dim, 2 * width),
            "midlayer.self_attn.v_proj": (kv_heads * dim, 2 * width),
            "midlayer.self_attn.o_proj": (width, heads * dim),
            "midlayer.mlp.gate_proj": (sizes["intermediate_size"], width),
            "midlayer.mlp.up_proj": (sizes["intermediate_size"], width),
            "midlayer.mlp.down_proj": (width, sizes["intermediate_size"]),
        }
        norms = (
            "midlayer.input_layernorm",
            "midlayer.hidden_norm",
            "midlayer.post_attention_layernorm",
            "norm",
        )
        self.names = [*shapes, *norms, "lm_head"]
        values = [torch.randn(*shape) * shape[1] ** -0.5 for shape in shapes.values()]
        values += [torch.ones(width) for _ in norms]
        self.weights = nn.ParameterList([*values, head.clone()])
        self._heads, self._group, self._dim = heads, heads // kv_heads, dim

    def run(self, batch: TextBatch, counts: Tensor) -> Iterator[Tensor]:
        """Yield the scores of known tokens at the places of `counts`, bool [n, num_places], of each pass:
        [num_counted, num_known]."""
        t = dict(zip(self.names, self.weights, strict=True))
        token = _norm(self.embedding[batch.token_ids], t["midlayer.input_layernorm"])
        states = batch.inner @ t["fc"].T
        passes: list[tuple[Tensor, Tensor]] = []
        for _ in range(NUM_PASSES):
            both = torch.cat((token, _norm(states, t["midlayer.hidden_norm"])), -1)
            q = self._split(both @ t["midlayer.self_attn.q_proj"].T, 1)
            k = self._split(both @ t["midlayer.self_attn.k_proj"].T, self._group)
            v = self._split(both @ t["midlayer.self_attn.v_proj"].T, self._group, rotates=False)
            passes.append((k, v))
            attended = _attend(q, passes).transpose(1, 2).flatten(2)
            x = states + attended @ t["midlayer.self_attn.o_proj"].T
            fed = _norm(x, t["midlayer.post_attention_layernorm"])
            gate, up = (fed @ t[f"midlayer.mlp.{name}_proj"].T for name in ("gate", "up"))
            x = x + (F.silu(gate) * up) @ t["midlayer.mlp.down_proj"].T
            yield _norm(x[counts], t["norm"]) @ t["lm_head"].T
            states = F.pad(x[:, :-1], (0, 0, 1, 0))  # the state before the next token is the head's own

    def _split(self, x: Tensor, copies: int, rotates: bool = True) -> Tensor:
        """Return heads of x, [n, heads, num_places, dim], rotated by their places."""
        x = x.unflatten(-1, (-1, self._dim)).transpose(1, 2)
        if rotates:
            half = self._dim // 2
            angles = torch.arange(x.shape[2])[:, None] / THETA ** (torch.arange(half) / half)
            first, second = x.split(half, -1)
            cos, sin = angles.cos(), angles.sin()
            x = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
        return x.repeat_interleave(copies, 1)

    def save(self, directory: Path) -> None:
        tensors = {
            f"{name}.weight": each.detach().half()
            for name, each in zip(self.names, self.weights, strict=True)
        }
        vocab_size = len(self.embedding)
        is_known = torch.zeros(vocab_size, dtype=torch.bool)
        is_known[self.known] = True
        tensors |= {"d2t": self.known - torch.arange(len(self.known)), "t2d": is_known}
        config = self.sizes | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "num_hidden_layers": 1,
            "hidden_act": "silu",
            "rms_norm_eps": EPS,
            "rope_theta": THETA,
            "vocab_size": vocab_size,
            "draft_vocab_size": len(self.known),
            "eagle_aux_hidden_state_layer_ids": self.layers,
        }
        write(directory, config, tensors, "model.safetensors")


def _attend(q: Tensor, passes: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Return the attention of the last pass. Place i reads the first pass up to place i - p, where p passes
    came before the last one, and then one place of each later pass."""
    before, scale = len(passes) - 1, q.shape[-1] ** -0.5
    keys, values = passes[0]
    scores = q @ keys.transpose(2, 3) * scale
    hidden = torch.ones(scores.shape[2:], dtype=torch.bool).triu(1 - before)
    scores = scores.masked_fill(hidden, -torch.inf)
    later = [(_delay(k, before - i), _delay(v, before - i)) for i, (k, v) in enumerate(passes) if i]
    own = [(q * k).sum(-1, keepdim=True) * scale for k, _ in later]
    weights = torch.cat((scores, *own), -1).softmax(-1)
    places = scores.shape[-1]
    y = weights[..., :places] @ values
    for i, (_, v) in enumerate(later):
        y = y + weights[..., places + i : places + i + 1] * v
    return y


def _delay(x: Tensor, places: int) -> Tensor:
    return F.pad(x[:, :, : x.shape[2] - places], (0, 0, places, 0))


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight


def train_eagle3(head: Eagle3Head, texts: Sequence[TappedText], scores_of: Tensor, seconds: float) -> None:
    """Train for a time, with a learning rate that falls to zero. The targets are the model's probabilities of
    the known tokens, whose rows of its head are `scores_of`."""
    cropped = [text.crop() for text in texts if len(text.token_ids) > text.prompt_len + 1]
    optimizer = torch.optim.AdamW(head.parameters(), LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.01)
    began = last = time.monotonic()
    while (elapsed := time.monotonic() - began) < seconds:
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * 0.5 * (1 + math.cos(math.pi * elapsed / seconds))
        chosen = [cropped[i] for i in torch.randint(len(cropped), (NUM_TEXTS,)).tolist()]
        batch = TextBatch.of(chosen)
        with torch.autocast("cpu", torch.bfloat16):
            wanted = batch.states[batch.counts] @ scores_of.T
            losses = [cross_entropy(scores, wanted) for scores in head.run(batch, batch.counts)]
            loss = torch.stack(losses).sum()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        if time.monotonic() - last > 20:
            last = time.monotonic()
            report(f"{elapsed:.0f} s: losses {', '.join(f'{each.item():.2f}' for each in losses)}")


@torch.inference_mode()
def measure_eagle3(head: Eagle3Head, texts: Sequence[TappedText], index: Tensor) -> list[float]:
    """Return the share of places at which the first proposal is right, the first two are, and so on. Each
    reads right tokens, so it is the head's own if those before it are right."""
    rights: list[list[Tensor]] = [[] for _ in range(NUM_PASSES)]
    for text in texts:
        if len(text.token_ids) <= text.prompt_len + NUM_PASSES:
            continue
        batch = TextBatch.of([text])
        wanted = index[text.token_ids[2:]]
        right = torch.ones(len(wanted), dtype=torch.bool)
        for number, scores in enumerate(head.run(batch, torch.ones_like(batch.counts))):
            # Draft `number` of a sequence is at the place `number` after that of its first draft.
            right = F.pad(right[:-1], (1, 0)) if number else right
            right &= scores.argmax(-1) == wanted
            first = max(text.prompt_len - 2, 0) + number
            rights[number].append(right[first : len(wanted) - NUM_PASSES + 1 + number].float())
    return [torch.cat(each).mean().item() for each in rights]
