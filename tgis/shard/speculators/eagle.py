"""EAGLE heads (Li et al., "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty", 2024), as
their authors, vLLM and SGLang publish them. Layers read a projection of a token's embedding and of the served
model's final state before it, and predict the final state after it, which the model's own head scores."""

import re
from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from tgis.hub.speculators import find_eagle
from tgis.shard.attention.interface import Attention
from tgis.shard.checkpoint.files import MODEL_FILES
from tgis.shard.checkpoint.opening import OpenCheckpoint
from tgis.shard.checkpoint.weights import Source
from tgis.shard.layers.linear import Replicated
from tgis.shard.layers.ops import Parts
from tgis.shard.models.config_reader import Config, section
from tgis.shard.models.families import llama
from tgis.shard.models.interface import NO_TAPS, ConfigurationError, SpeculativeModel, StepInputs
from tgis.shard.models.spec import DecoderSpec
from tgis.shard.speculators.draft_head import FIRST_KEY, HeadLayers, open_embedding

NAME = "eagle"
FILES = MODEL_FILES
PREFIX = "model."
UNROUNDED = re.compile(r"(?:^|\.)(?:fc|embed_tokens)\.")
NUM_TOKENS = 5


class Eagle:
    """`DraftHead` with layers of Llama, the first of which reads its input without a norm."""

    num_tokens = NUM_TOKENS
    taps = NO_TAPS

    def __init__(self, spec: DecoderSpec, parts: Parts, model: SpeculativeModel):
        self.spec = spec
        self.state_size = size = spec.hidden_size
        self._concatenate = parts.kernels.concatenate
        self._embed = open_embedding(parts, spec, model)
        self._project = Replicated(parts, "fc", 2 * size, size, bias=parts.weights.has("fc.bias"))
        self._layers = HeadLayers(spec, parts, spec.num_layers)
        self._score = _open_score(parts, spec, model)

    def advance(self, states: Tensor, inputs: StepInputs, attention: Attention) -> Tensor:
        x = self._concatenate(self._embed(inputs.token_ids), states)  # [num_tokens, 2 * hidden_size]
        return self._layers(self._project(x, None), inputs, attention)

    def score(self, states: Tensor) -> Tensor:
        return self._score(states)

    def choose(self, scores: Tensor) -> Tensor:
        return scores.argmax(-1)


def reads(config: Config) -> bool:
    return find_eagle(config) == NAME


def has_tensors(checkpoint: OpenCheckpoint) -> bool:
    """Return True for tensors of a head whose config.json is that of a Llama, as its authors publish it."""
    return "fc.weight" in checkpoint


def sources(config: Config) -> dict[str, Source]:
    own = llama.layer_sources("layers.{i}.")
    return {**own, "fc": "fc", "embed": "embed_tokens", "head": "lm_head"}


def make_spec(config: Config) -> DecoderSpec:
    """Return the specification of the head's layers. Raises UnsupportedModelError."""
    layer = {**config, **section(config, "model"), **section(config, "transformer_layer_config")}
    spec = llama.spec({"num_hidden_layers": 1, **layer, "tie_word_embeddings": False})
    return replace(spec, first_key=FIRST_KEY, has_first_norm=False)


def build(config: Config, parts: Parts, model: SpeculativeModel) -> Eagle:
    """Build the head for a model. Raises UnsupportedModelError and WeightsError."""
    spec = make_spec(config)
    actual = {"vocab_size": spec.vocab_size, "hidden_size": spec.hidden_size}
    expected = {"vocab_size": model.spec.vocab_size, "hidden_size": model.prompt_width}
    for key, value in actual.items():
        if value != expected[key]:
            raise ConfigurationError(f"{key} {value} differs from the model's {expected[key]}")
    return Eagle(spec, parts, model)


def _open_score(parts: Parts, spec: DecoderSpec, model: SpeculativeModel) -> Callable[[Tensor], Tensor]:
    """Return the product with the model's head, of which some checkpoints have a copy."""
    if parts.weights.has("head.weight"):
        return parts.pack("head", "head", (spec.vocab_size, spec.hidden_size))
    return model.scores
