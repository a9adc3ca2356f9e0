"""Medusa heads (Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding
Heads", 2024). Head i predicts the token i + 1 places after the last one from the model's last state alone."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial, reduce

import torch
from torch import Tensor

from tgis.shard.checkpoint.files import MODEL_FILES
from tgis.shard.checkpoint.weights import Source, first_of
from tgis.shard.layers.linear import Replicated
from tgis.shard.layers.ops import Kernels, Parts, Product
from tgis.shard.models.config_reader import Config, integer, refuse_others
from tgis.shard.models.interface import SpeculativeModel
from tgis.shard.speculators.interface import StageRunner, run_stage

NAME = "medusa"
FILES = (
    ("medusa_lm_head.safetensors", "medusa_lm_head.safetensors.index.json"),
    ("medusa_lm_head.pt", "medusa_lm_head.pt.index.json"),
    *MODEL_FILES,
)
PREFIX = "medusa_heads."
UNROUNDED = re.compile(r"\.linear\.|(?:^|\.)blocks\.")


@dataclass(frozen=True)
class Head:
    """Residual blocks x + silu(linear(x)) and the scores that follow them."""

    blocks: Sequence[Replicated]
    score: Product | None  # [n, width] -> [n, vocab_size]; None: the model's own head


class Medusa:
    """`Speculator` whose heads do not depend on each other."""

    def __init__(self, heads: Sequence[Head], model: SpeculativeModel, kernels: Kernels):
        self._heads = heads
        self._model = model
        self._kernels = kernels

    @property
    def num_tokens(self) -> int:
        return len(self._heads)

    def propose(
        self, states: Tensor, token_ids: Tensor, num_tokens: int, run: StageRunner = run_stage
    ) -> Tensor:
        scores = run(num_tokens, partial(self._score, self._heads[:num_tokens]), states)
        if len(scores) == 1:
            return scores[0].argmax(-1).view(len(states), num_tokens)
        return torch.stack([each.argmax(-1) for each in scores], 1)

    def _score(self, heads: Sequence[Head], states: Tensor) -> list[Tensor]:
        """Return the scores of each head, or those of all heads of the first row, then of the second, and so
        on."""
        outputs = [self._run_blocks(head, states) for head in heads]
        if heads[0].score is None:  # the model's head runs once for all
            joined = reduce(self._kernels.concatenate, outputs)  # [n, num_tokens * width]
            return [self._model.scores(joined.view(-1, states.shape[1]))]
        scored = zip(heads, outputs, strict=True)
        return [head.score(x) for head, x in scored if head.score is not None]

    def _run_blocks(self, head: Head, states: Tensor) -> Tensor:
        for block in head.blocks:
            states = self._kernels.add(self._kernels.activate(block(states, None), "silu"), states)
        return states


def reads(config: Config) -> bool:
    return "medusa_num_heads" in config or config.get("model_type") == NAME


def sources(config: Config) -> dict[str, Source]:
    """Return the tensors of each head, as its authors publish them or else as vLLM's models have them."""
    return {
        "heads.{i}.blocks.{e}.linear": first_of("{i}.{e}.linear", "blocks.{i}.layers.{e}"),
        "heads.{i}.score": first_of(f"{{i}}.{_count_layers(config)}", "lm_heads.{i}"),
    }


def make_spec(config: Config) -> None:
    """Return None: it has no layers with a cache."""


def build(config: Config, parts: Parts, model: SpeculativeModel) -> Medusa:
    """Build the heads for a model. Raises UnsupportedModelError and WeightsError."""
    vocab_size = model.spec.vocab_size
    width = model.prompt_width
    refuse_others(config, vocab_size=vocab_size, truncated_vocab_size=vocab_size, hidden_size=width)
    num_heads = integer(config, "medusa_num_heads", config.get("num_heads"))
    has_scores = parts.weights.has("heads.0.score.weight")
    heads = []
    for i in range(num_heads):
        blocks = []
        for layer in range(_count_layers(config)):
            path = f"heads.{i}.blocks.{layer}.linear"
            blocks.append(Replicated(parts, path, width, width, bias=parts.weights.has(f"{path}.bias")))
        score = parts.pack("head", f"heads.{i}.score", (vocab_size, width)) if has_scores else None
        heads.append(Head(blocks, score))
    return Medusa(heads, model, parts.kernels)


def _count_layers(config: Config) -> int:
    """Return the number of a head's residual blocks. Raises ConfigurationError."""
    return integer(config, "medusa_num_layers", config.get("num_hidden_layers") or 1)
