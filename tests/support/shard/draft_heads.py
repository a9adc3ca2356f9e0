"""Tiny draft heads in their published layouts, and plain models of them over transformers' states: every
proposal is computed from the beginning, without a cache.

Their last matrices are fitted to given texts, so that some proposals for these texts are right."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from tests.support.shard.speculators import Tensors, fit

HEADS, KV_HEADS, HEAD_DIM, INNER = 4, 2, 16, 96
EPS = 1e-5
THETA = 10000.0


@dataclass
class States:
    """States that a model of transformers computes for tokens."""

    model: Any
    known: list[tuple[list[int], tuple[Tensor, ...]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model.eval()
        self.embedding: Tensor = self.model.get_input_embeddings().weight.detach()
        self.num_layers: int = self.model.config.num_hidden_layers

    @classmethod
    def load(cls, directory: Path) -> "States":
        return cls(transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32))

    @torch.inference_mode()
    def find(self, token_ids: Sequence[int]) -> tuple[Tensor, ...]:
        """Return the inputs of all layers, and the final states, for each of the tokens."""
        for ids, states in self.known:
            if ids[: len(token_ids)] == list(token_ids):
                return tuple(each[: len(token_ids)] for each in states)
        output = self.model(torch.tensor([list(token_ids)]), output_hidden_states=True)
        self.known.append((list(token_ids), tuple(each[0] for each in output.hidden_states)))
        return self.known[-1][1]


class PlainHead:
    """Plain model of a head: `advance` returns its states for [n, width] states and the n tokens after
    them, and `score` the scores of the tokens `ids`."""

    def __init__(
        self,
        states: States,
        read: Callable[[tuple[Tensor, ...]], Tensor],
        advance: Callable[[Tensor, Tensor], Tensor],
        score: Callable[[Tensor], Tensor],
        ids: Tensor,
    ) -> None:
        self.states, self.read, self.advance, self.score, self.ids = states, read, advance, score, ids

    @torch.inference_mode()
    def propose(self, known: Sequence[int], count: int) -> list[int]:
        before = self.read(self.states.find(known))[:-1]
        tokens = list(known[1:])
        for _ in range(count):
            after = self.advance(before, torch.tensor(tokens))[-1:]
            tokens.append(int(self.ids[self.score(after)[0].argmax()]))
            before = torch.cat((before, after))
        return tokens[len(known) - 1 :]

    def fit(self, texts: Sequence[Sequence[int]], finish: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the matrix of scores that is closest to the next tokens, given the last states."""
        place = {int(token): i for i, token in enumerate(self.ids)}
        inputs, targets = [], []
        for text in texts:
            after = finish(self.advance(self.read(self.states.find(text))[:-1], torch.tensor(text[1:])))
            at = [i for i, token in enumerate(text[2:]) if token in place]
            inputs.append(after[at])
            targets += [place[text[2 + i]] for i in at]
        return fit(torch.cat(inputs), torch.tensor(targets), len(self.ids))

    def check(self, proposed: Sequence[tuple[list[int], list[int]]]) -> None:
        """Check proposals, each with the tokens before it."""
        for known, ids in sorted(proposed, key=lambda each: -len(each[0])):
            if ids:
                assert ids == self.propose(known, len(ids)), known


def rms(x: Tensor, weight: Tensor, eps: float = EPS) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rotate(x: Tensor) -> Tensor:
    """Rotate heads, [n, heads, HEAD_DIM], by their positions 0 ... n - 1."""
    half = HEAD_DIM // 2
    angles = torch.arange(len(x))[:, None] / THETA ** (torch.arange(half) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def attend(source: Tensor, t: Tensors, path: str) -> Tensor:
    """Return causal attention with the projections at a path, [n, width]."""

    def project(name: str) -> Tensor:
        bias = t.get(f"{path}.{name}.bias")
        return F.linear(source, t[f"{path}.{name}.weight"], bias).view(len(source), -1, HEAD_DIM)

    q, k = rotate(project("q_proj")), rotate(project("k_proj"))
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, project("v_proj")))
    scores = torch.einsum("qhd,khd->hqk", q, k) / HEAD_DIM**0.5
    hidden = torch.ones(len(source), len(source), dtype=torch.bool).triu(1)
    y = torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)
    return y.flatten(1) @ t[f"{path}.o_proj.weight"].T


def feed_forward(x: Tensor, t: Tensors, path: str) -> Tensor:
    gate, up, down = (t[f"{path}.{name}_proj.weight"] for name in ("gate", "up", "down"))
    return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T


def draw_layer(t: Tensors, path: str, width: int, source: int, random: torch.Generator) -> None:
    shapes = {
        "self_attn.q_proj": (HEADS * HEAD_DIM, source),
        "self_attn.k_proj": (KV_HEADS * HEAD_DIM, source),
        "self_attn.v_proj": (KV_HEADS * HEAD_DIM, source),
        "self_attn.o_proj": (width, HEADS * HEAD_DIM),
        "mlp.gate_proj": (INNER, width),
        "mlp.up_proj": (INNER, width),
        "mlp.down_proj": (width, INNER),
    }
    for name, shape in shapes.items():
        t[f"{path}.{name}.weight"] = 0.2 * torch.randn(*shape, generator=random)


def draw_norm(t: Tensors, path: str, width: int, random: torch.Generator) -> None:
    t[f"{path}.weight"] = 1 + 0.2 * torch.randn(width, generator=random)


def layer_config(vocab_size: int, width: int) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": width,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "num_hidden_layers": 1,
        "rms_norm_eps": EPS,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
    }
