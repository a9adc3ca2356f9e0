"""Heads for multi-token prediction that are part of a checkpoint (DeepSeek-AI, "DeepSeek-V3 Technical
Report", 2024). A layer of the model's family reads a projection of a token's embedding and of the model's
final state before it, each through a norm. The model's own head scores its output, which is also the next
state."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from tgis.shard.attention.interface import Attention
from tgis.shard.checkpoint.tensors import WeightsError
from tgis.shard.checkpoint.weights import Source, at_layer, moved
from tgis.shard.collectives import ProcessGroup
from tgis.shard.layers.linear import Replicated
from tgis.shard.layers.ops import Parts
from tgis.shard.models import registry
from tgis.shard.models.config_reader import Config, refuse_others
from tgis.shard.models.families.qwen3_5 import read_text_config
from tgis.shard.models.interface import NO_TAPS, SpeculativeModel, StepInputs, UnsupportedModelError
from tgis.shard.models.parts.blocks import make_norm
from tgis.shard.models.spec import DecoderSpec
from tgis.shard.quant.formats.settings import read_settings
from tgis.shard.quant.registry import find_format, find_scheme, find_scheme_name
from tgis.shard.speculators.draft_head import FIRST_KEY, HeadLayers
from tgis.shard.speculators.finite_weights import FiniteWeights

NAME = "heads for multi-token prediction"
NUM_TOKENS = 3
LAYER = "model.layers.{i}."  # leading part of the names of a family's layers


@dataclass(frozen=True)
class MTPLayout:
    """Names of a head's tensors in a checkpoint."""

    token_norm: str
    state_norm: str
    project: str
    norm: str
    is_token_first: bool  # in the input of the projection
    prefix: str | None = None  # of all names; None: the head is the layer after the model's last one
    layer: str = ""  # what follows the prefix in the names of the layer
    copies: tuple[str, ...] = ()  # tensors that are those of the model
    count: str | None = "num_nextn_predict_layers"  # key of the number of heads, if there is one


DEEPSEEK = MTPLayout(
    "enorm", "hnorm", "eh_proj", "shared_head.norm", True, copies=("embed_tokens", "shared_head.head")
)
MIMO = MTPLayout(
    "token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm", False, "model.mtp_layers.0."
)
QWEN3_NEXT = MTPLayout(
    "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", True, "mtp.", "layers.0.", count=None
)
QWEN3_5 = replace(QWEN3_NEXT, count="mtp_num_hidden_layers")
LAYOUTS: Mapping[str, MTPLayout] = {
    "mimo": MIMO,
    "deepseek_v3": DEEPSEEK,
    "glm4_moe": DEEPSEEK,
    "qwen3_next": QWEN3_NEXT,
    **dict.fromkeys(("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), QWEN3_5),
}


class MTPHead:
    """`DraftHead` with a layer of the model's family."""

    num_tokens = NUM_TOKENS
    taps = NO_TAPS

    def __init__(self, spec: DecoderSpec, parts: Parts, model: SpeculativeModel, is_token_first: bool):
        self.spec = spec
        self.state_size = size = spec.hidden_size
        self._model = model
        self._concatenate = parts.kernels.concatenate
        self._is_token_first = is_token_first
        self._norm_token, self._norm_state, self._norm = (
            make_norm(spec, parts, path) for path in ("norm_token", "norm_state", "norm")
        )
        self._project = Replicated(parts, "project", 2 * size, size)
        self._layers = HeadLayers(spec, parts, 1)

    def advance(self, states: Tensor, inputs: StepInputs, attention: Attention) -> Tensor:
        token = self._norm_token(self._model.embed_tokens(inputs.token_ids))
        state = self._norm_state(states)
        both = (token, state) if self._is_token_first else (state, token)
        x = self._project(self._concatenate(*both), None)
        return self._norm(self._layers(x, inputs, attention))

    def score(self, states: Tensor) -> Tensor:
        return self._model.scores(states)

    def choose(self, scores: Tensor) -> Tensor:
        return scores.argmax(-1)


def load_mtp(directory: Path, config: Config, model: SpeculativeModel, dtype: torch.dtype) -> MTPHead:
    """Load the head in the checkpoint of a model. Raises UnsupportedModelError and WeightsError."""
    layout = _find_layout(config)
    sources = _list_sources(config, layout, model.spec)
    prefix = getattr(registry.FAMILIES[config["model_type"]], "PREFIX", "")
    kernels = model.parts.kernels
    with FiniteWeights(directory, sources, prefix, find_format(config, directory)) as weights:
        group = ProcessGroup(0, 1, device=kernels.device)
        scheme = find_scheme(find_scheme_name(None, read_settings(config, directory)))
        parts = Parts(group, weights, dtype, kernels, scheme=scheme)
        head = MTPHead(make_spec(model.spec), parts, model, layout.is_token_first)
        if unread := min(_list_unread(layout, model.spec, weights.list_unread()), default=None):
            raise WeightsError(f"tensor {unread} is not read: its config.json describes another head")
    return head


def _find_layout(config: Config) -> MTPLayout:
    layout = LAYOUTS.get(config["model_type"])
    if layout is None:
        known = ", ".join(LAYOUTS)
        raise UnsupportedModelError(
            f"{NAME} of {config['model_type']} are not supported; supported are: {known}"
        )
    if layout.count is not None:
        config = read_text_config(config)
        if not config.get(layout.count):
            given = config.get(layout.count)
            raise UnsupportedModelError(f"the checkpoint has no {NAME}: {layout.count} is {given}")
        refuse_others(config, **{layout.count: 1})
    refuse_others(config, mtp_use_dedicated_embeddings=False)
    return layout


def make_spec(spec: DecoderSpec) -> DecoderSpec:
    """Return the specification of a layer like the model's last one with attention. Raises
    UnsupportedModelError."""
    if any(spec.windows):
        raise UnsupportedModelError(f"{NAME} of a model with a sliding window are not supported")
    experts = None if spec.experts is None else replace(spec.experts, dense_layers=frozenset())
    return replace(spec, num_layers=1, experts=experts, windows=(), delta_net=None, first_key=FIRST_KEY)


def _list_sources(config: Config, layout: MTPLayout, spec: DecoderSpec) -> dict[str, Source]:
    family = registry.FAMILIES[config["model_type"]].sources(spec)
    layers = {path: source for path, source in family.items() if "{i}" in path}
    begin = _find_begin(layout, spec)
    if layout.prefix is None:
        layers = {path: at_layer(spec.num_layers, source) for path, source in layers.items()}
    else:
        layers = {path: moved(source, LAYER, begin + layout.layer) for path, source in layers.items()}
    own = {
        "norm_token": layout.token_norm,
        "norm_state": layout.state_norm,
        "project": layout.project,
        "norm": layout.norm,
    }
    return layers | {path: begin + name for path, name in own.items()}


def _find_begin(layout: MTPLayout, spec: DecoderSpec) -> str:
    """Return the leading part of the names of the head's tensors."""
    return f"model.layers.{spec.num_layers}." if layout.prefix is None else layout.prefix


def _list_unread(layout: MTPLayout, spec: DecoderSpec, names: Iterator[str]) -> Iterator[str]:
    """Yield the names that are those of the head's own tensors."""
    begin = _find_begin(layout, spec)
    copies = {f"{begin}{name}.weight" for name in layout.copies}
    return (name for name in names if name.startswith(begin) and name not in copies)
