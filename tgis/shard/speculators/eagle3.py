"""EAGLE-3 heads (Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via
Training-Time Test", 2025), as their authors, vLLM and SGLang publish them. One layer, whose attention reads a
token's embedding beside the state before it. The served model's state is a projection of three inner ones."""

import re
from dataclasses import replace

import torch
from torch import Tensor

from tgis.hub.speculators import find_eagle
from tgis.shard.attention.interface import Attention
from tgis.shard.checkpoint.files import MODEL_FILES
from tgis.shard.checkpoint.tensors import WeightsError
from tgis.shard.checkpoint.weights import Source, first_of, stack
from tgis.shard.layers.norm import Norm
from tgis.shard.layers.ops import Parts
from tgis.shard.models.config_reader import Config, integer, refuse_others, section
from tgis.shard.models.decoder import LayerAttention
from tgis.shard.models.families import llama
from tgis.shard.models.interface import (
    ConfigurationError,
    SpeculativeModel,
    StepInputs,
    Taps,
    UnsupportedModelError,
)
from tgis.shard.models.parts.blocks import MLP, BranchInput
from tgis.shard.models.spec import DecoderSpec
from tgis.shard.speculators.draft_head import FIRST_KEY, HeadLayers, open_embedding

NAME = "eagle3"
FILES = MODEL_FILES
PREFIX = "model."
UNROUNDED = re.compile(r"(?:^|\.)(?:fc|embed_tokens)\.")
NUM_TOKENS = 5
NUM_TAPS = 3


class Eagle3:
    """`DraftHead` with one layer."""

    num_tokens = NUM_TOKENS

    def __init__(self, spec: DecoderSpec, parts: Parts, model: SpeculativeModel, config: Config):
        self.spec = spec
        self.state_size = spec.hidden_size
        self.taps = _read_taps(config, parts, spec.hidden_size, model)
        self._add = parts.kernels.add
        self._concatenate = parts.kernels.concatenate
        self._keeps_norm = bool(config.get("norm_before_residual"))
        self._layers = HeadLayers(spec, parts, 0)
        norms = (f"blocks.0.{name}" for name in ("norm_token", "norm_state", "norm_2"))
        size = spec.hidden_size
        self._norm_token, self._norm_state, self._norm_2 = (
            Norm(parts, path, size, spec.norm_eps, "rms") for path in norms
        )
        self._attend = LayerAttention(spec, parts, "blocks.0", 0)
        self._feed_forward = MLP(spec, parts, "blocks.0.mlp")
        self._norm = Norm(parts, "norm", size, spec.norm_eps, "rms")
        self._embed = open_embedding(parts, spec, model)
        num_scores, self._ids = _read_token_ids(config, parts, spec.vocab_size)
        self._score = parts.pack("head", "head", (num_scores, size))

    def advance(self, states: Tensor, inputs: StepInputs, attention: Attention) -> Tensor:
        token = self._norm_token(self._embed(inputs.token_ids))
        state = self._norm_state(states)
        source = BranchInput(self._concatenate(token, state))  # [num_tokens, 2 * hidden_size]
        # The layer adds to x in place, and nothing else reads the states any more.
        x = state if self._keeps_norm else states
        context = self._layers.make_context(inputs, attention)
        delta = self._attend(x, source, context)
        delta = self._feed_forward(x, BranchInput(x, delta, self._norm_2), None)
        return x if delta is None else self._add(x, delta)

    def score(self, states: Tensor) -> Tensor:
        return self._score(self._norm(states))

    def choose(self, scores: Tensor) -> Tensor:
        chosen = scores.argmax(-1)
        return chosen if self._ids is None else self._ids[chosen]


def reads(config: Config) -> bool:
    return find_eagle(config) == NAME


def sources(config: Config) -> dict[str, Source]:
    def layer(name: str) -> Source:
        return first_of(f"midlayer.{name}", f"layers.0.{name}")

    return {
        "fc": "fc",
        "blocks.{i}.norm_token": layer("input_layernorm"),
        "blocks.{i}.norm_state": layer("hidden_norm"),
        "blocks.{i}.norm_2": layer("post_attention_layernorm"),
        "blocks.{i}.attention.qkv": stack(*(layer(f"self_attn.{x}_proj") for x in "qkv")),
        "blocks.{i}.attention.out": layer("self_attn.o_proj"),
        "blocks.{i}.mlp.up": stack(layer("mlp.gate_proj"), layer("mlp.up_proj")),
        "blocks.{i}.mlp.down": layer("mlp.down_proj"),
        "embed": "embed_tokens",
        "norm": "norm",
        "head": "lm_head",
    }


def make_spec(config: Config) -> DecoderSpec:
    """Return the specification of the head's layer. Raises UnsupportedModelError."""
    layer = {**config, **section(config, "transformer_layer_config")}
    refuse_others(layer, num_hidden_layers=1)
    spec = llama.spec({**layer, "num_hidden_layers": 1, "tie_word_embeddings": False})
    return replace(spec, first_key=FIRST_KEY, attention_input_size=2 * spec.hidden_size)


def build(config: Config, parts: Parts, model: SpeculativeModel) -> Eagle3:
    """Build the head for a model. Raises UnsupportedModelError and WeightsError."""
    spec = make_spec(config)
    refuse_others(section(config, "eagle_config"), use_aux_hidden_state=True)
    refuse_others(config, target_hidden_size=model.spec.hidden_size)
    if spec.vocab_size != model.spec.vocab_size:
        raise ConfigurationError(
            f"vocab_size {spec.vocab_size} differs from the model's {model.spec.vocab_size}"
        )
    return Eagle3(spec, parts, model, config)


def _read_taps(config: Config, parts: Parts, size: int, model: SpeculativeModel) -> Taps:
    """Return the taps of inner states, each with its own columns of the projection of all of them."""
    width = model.spec.hidden_size
    layers = find_layers(config, model.spec.num_layers)
    shape = (size, len(layers) * width)
    columns = [slice(i * width, (i + 1) * width) for i in range(len(layers))]
    products = [parts.pack("replicated", "fc", shape, columns=each) for each in columns]
    return dict(zip(layers, products, strict=True))


def find_layers(config: Config, num_layers: int) -> list[int]:
    """Return the numbers of the model's layers whose inputs the head reads. Raises UnsupportedModelError."""
    key = "eagle_aux_hidden_state_layer_ids"
    layers = config.get(key)
    if layers is None and (outputs := section(config, "eagle_config").get(key)) is not None:
        # Those of this section are layers whose outputs are read.
        is_list = isinstance(outputs, list) and all(type(number) is int for number in outputs)
        layers = [number + 1 for number in outputs] if is_list else outputs
    if layers is None:
        layers = [2, num_layers // 2, num_layers - 3]
    is_valid = isinstance(layers, list) and all(
        type(each) is int and 0 <= each < num_layers for each in layers
    )
    if not is_valid or len(set(layers)) != NUM_TAPS:
        raise UnsupportedModelError(f"{key} {layers} are not {NUM_TAPS} of the model's {num_layers} layers")
    return layers


def _read_token_ids(config: Config, parts: Parts, vocab_size: int) -> tuple[int, Tensor | None]:
    """Return the number of tokens that the head knows, and their ids, or None if it knows all."""
    count = integer(config, "draft_vocab_size", vocab_size)
    offsets = parts.weights.read_values("d2t", count, torch.int64)
    if offsets is None and count != vocab_size:
        raise WeightsError(f"tensor d2t is missing: draft_vocab_size {count} is not the model's {vocab_size}")
    ids = torch.arange(count) + (0 if offsets is None else offsets)
    is_known = torch.zeros(vocab_size, dtype=torch.bool)
    if not ((ids >= 0) & (ids < vocab_size)).all():
        raise WeightsError(f"tensor d2t has tokens that the model's {vocab_size} do not include")
    is_known[ids] = True
    known = parts.weights.read_values("t2d", vocab_size, torch.bool)
    if known is not None and not torch.equal(known, is_known):
        raise WeightsError("tensors d2t and t2d name different tokens")
    return count, None if offsets is None else ids.to(parts.kernels.device)
