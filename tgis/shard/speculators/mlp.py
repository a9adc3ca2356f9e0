"""MLP speculators of IBM's fms-extras (Wertheimer et al., "Accelerating Production LLMs with Combined
Token/Embedding Speculators", 2024). Each stage mixes the state before it with the embedding of the token
before it, and predicts one token."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from tgis.shard.checkpoint.files import MODEL_FILES
from tgis.shard.checkpoint.weights import Source, by_layer
from tgis.shard.layers.ops import Kernels, Parts, Product, Table
from tgis.shard.models.config_reader import Config, count, integer
from tgis.shard.models.interface import ConfigurationError, SpeculativeModel
from tgis.shard.speculators.interface import StageRunner, run_stage

NAME = "mlp_speculator"
FILES = MODEL_FILES
PREFIX = "speculator."
UNROUNDED = re.compile(r"(?:^|\.)(?:emb|proj)\.")
EPS = 1e-6


@dataclass(frozen=True)
class Stage:
    """Stage whose norm is an RMS norm with a bias."""

    embedding: Table
    project: Product  # [n, width before] -> [n, inner_dim]
    norm_weight: Tensor  # float32 [inner_dim]
    norm_bias: Tensor  # float32 [inner_dim]
    score: Product  # [n, inner_dim] -> [n, vocab_size]


class MLPSpeculator:
    """`Speculator` with one stage for each token."""

    def __init__(self, stages: Sequence[Stage], input_scale: Tensor | None, kernels: Kernels):
        """`input_scale`, float32 [width], is the weight of the norm of the model's states, if they are
        normalised."""
        self._stages = stages
        self._input_scale = input_scale
        self._kernels = kernels
        inner_dim = stages[0].embedding.width
        # The first state has half of the weight in the last stage.
        self._state_weight = 0.5 ** (0.5 / len(stages))
        self._embedding_weight = math.sqrt((1 - self._state_weight**2) * inner_dim / 2)

    @property
    def num_tokens(self) -> int:
        return len(self._stages)

    def propose(
        self, states: Tensor, token_ids: Tensor, num_tokens: int, run: StageRunner = run_stage
    ) -> Tensor:
        proposed = []
        for number in range(num_tokens):
            states, scores = run(number, partial(self._advance, number), states, token_ids)
            token_ids = scores.argmax(-1)
            proposed.append(token_ids)
        return torch.stack(proposed, 1)

    def _advance(self, number: int, states: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the states after a stage, and the scores of its tokens."""
        kernels = self._kernels
        stage = self._stages[number]
        if self._input_scale is not None and number == 0:
            states = kernels.rms_norm(states, None, self._input_scale, EPS)
        mixed = kernels.scale(stage.project(states), self._state_weight)
        embedded = kernels.scale(stage.embedding.look_up(token_ids), self._embedding_weight)
        mixed = kernels.add(mixed, embedded)
        mixed = kernels.rms_norm(mixed, None, stage.norm_weight, EPS)
        states = kernels.activate(kernels.add(mixed, stage.norm_bias), "gelu")
        return states, stage.score(states)


def reads(config: Config) -> bool:
    return config.get("model_type") == NAME


def sources(config: Config) -> dict[str, Source]:
    """Return the tensors of each stage. Tied stages share all of them, except that the first one has its own
    projection."""
    if not config.get("tie_weights"):
        return {f"stages.{{i}}.{name}": f"{name}.{{i}}" for name in ("emb", "proj", "ln", "head")}
    shared: dict[str, Source] = {f"stages.{{i}}.{name}": f"{name}.0" for name in ("emb", "ln", "head")}
    return shared | {"stages.{i}.proj": by_layer(lambda stage: f"proj.{min(stage, 1)}")}


def make_spec(config: Config) -> None:
    """Return None: it has no layers with a cache."""


def find_inner_dim(config: Config, width: int) -> int:
    """Return the width of a stage's state, given that of the model's. Raises ConfigurationError."""
    return count(config, "inner_dim", 0) or width


def build(config: Config, parts: Parts, model: SpeculativeModel) -> MLPSpeculator:
    """Build the speculator for a model. Raises UnsupportedModelError and WeightsError."""
    width = model.prompt_width
    for key, expected in (("vocab_size", model.spec.vocab_size), ("emb_dim", width)):
        if (actual := integer(config, key)) != expected:
            raise ConfigurationError(f"{key} {actual} differs from the model's {expected}")
    inner_dim = find_inner_dim(config, width)
    vocab_size = model.spec.vocab_size
    stages: list[Stage] = []
    for i in range(integer(config, "n_predict")):
        path = f"stages.{i}"
        if config.get("tie_weights") and i > 1:
            stages.append(stages[1])
            continue
        shape = (inner_dim, width if i == 0 else inner_dim)
        tied = stages[0] if config.get("tie_weights") and i else None
        stages.append(
            Stage(
                tied.embedding if tied else parts.open_table(f"{path}.emb", (vocab_size, inner_dim)),
                parts.pack("replicated", f"{path}.proj", shape),
                parts.read_vector(f"{path}.ln.weight", inner_dim),
                parts.read_vector(f"{path}.ln.bias", inner_dim),
                tied.score if tied else parts.pack("head", f"{path}.head", (vocab_size, inner_dim)),
            )
        )
    scale = torch.full((width,), 0.5**0.5, device=parts.kernels.device) if config.get("scale_input") else None
    return MLPSpeculator(stages, scale, parts.kernels)
