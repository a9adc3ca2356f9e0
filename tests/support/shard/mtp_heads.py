"""Tiny checkpoints with heads for multi-token prediction in their published layouts. The plain model of a
head runs the last layer of a model of transformers that has one layer more."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.shard.checkpoints import randomise
from tests.support.shard.draft_heads import PlainHead, States, rms
from tests.support.shard.family_cases.llamas import (
    FULL,
    LATENT_ROPE,
    delta_net,
    delta_net_experts,
    glm4_moe,
    latents,
    sizes,
    without_width,
)
from tests.support.shard.speculator_scene import EOS, VOCAB_SIZE
from tests.support.tokenizers.trained import write_byte_level

NUM_LAYERS = 2
SIZES: dict[str, Any] = {"num_hidden_layers": NUM_LAYERS + 1, "vocab_size": VOCAB_SIZE, "eos_token_id": EOS}
RECURRENT = {"layer_types": ["linear_attention", FULL, FULL], "full_attention_interval": 2}
WHOLE = {**SIZES, **RECURRENT, "tie_word_embeddings": False}
CONFIGS: dict[str, Callable[[], hf.PretrainedConfig]] = {
    "mimo": lambda: hf.Qwen2Config(**sizes(**SIZES, tie_word_embeddings=False)),
    "deepseek_v3": lambda: hf.DeepseekV3Config(**latents(rope_parameters=dict(LATENT_ROPE), **SIZES)),
    "glm4_moe": lambda: hf.Glm4MoeConfig(**glm4_moe(**SIZES)),
    "qwen3_next": lambda: hf.Qwen3NextConfig(**delta_net_experts(**WHOLE)),
    "qwen3_5_text": lambda: hf.Qwen3_5TextConfig(**delta_net(**WHOLE | {"tie_word_embeddings": True})),
    "qwen3_5_moe_text": lambda: hf.Qwen3_5MoeTextConfig(**without_width(delta_net_experts(**WHOLE))),
}


class Layout(NamedTuple):
    """Published names: of the head's layer, and of its norms of tokens and states, projection and last
    norm."""

    layer: str
    names: tuple[str, str, str, str]
    is_token_first: bool = True
    has_copies: bool = False  # of the model's embedding and head
    norms_add_one: bool = False  # the norms' weights are one less than their factors
    settings: Mapping[str, Any] = MappingProxyType({})  # of config.json


_LAST = f"model.layers.{NUM_LAYERS}."
_DEEPSEEK = Layout(
    _LAST,
    (f"{_LAST}enorm", f"{_LAST}hnorm", f"{_LAST}eh_proj", f"{_LAST}shared_head.norm"),
    has_copies=True,
    settings={"num_nextn_predict_layers": 1},
)
_MIMO = "model.mtp_layers.0."
_QWEN = Layout(
    "mtp.layers.0.",
    ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm"),
    norms_add_one=True,
)
_QWEN3_5 = _QWEN._replace(settings={"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False})
LAYOUTS = {
    "mimo": Layout(
        _MIMO,
        (
            f"{_MIMO}token_layernorm",
            f"{_MIMO}hidden_layernorm",
            f"{_MIMO}input_proj",
            f"{_MIMO}final_layernorm",
        ),
        is_token_first=False,
        settings={"num_nextn_predict_layers": 1},
    ),
    "deepseek_v3": _DEEPSEEK,
    "glm4_moe": _DEEPSEEK,
    "qwen3_next": _QWEN,
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5_moe_text": _QWEN3_5,
}
KEEP_STATES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")


def write_mtp(directory: Path, kind: str) -> PlainHead:
    """Write a model with a head. Return the head's plain model."""
    torch.manual_seed(3)
    config, layout = CONFIGS[kind](), LAYOUTS[kind]
    model: Any = hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomise(model)
    model.save_pretrained(directory)
    write_byte_level(directory, 400)
    tensors = load_file(directory / "model.safetensors")
    tensors = {
        layout.layer + name.removeprefix(_LAST) if name.startswith(_LAST) else name: x
        for name, x in tensors.items()
    }
    width = config.hidden_size
    factors = [1 + 0.2 * torch.randn(width) for _ in range(3)]
    norms = [factor - int(layout.norms_add_one) for factor in factors]
    project = 0.2 * torch.randn(width, 2 * width)
    matrices = (norms[0], norms[1], project, norms[2])
    own = {f"{name}.weight": x for name, x in zip(layout.names, matrices, strict=True)}
    if layout.has_copies:
        own[f"{_LAST}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        own[f"{_LAST}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors | own, directory / "model.safetensors", {"format": "pt"})
    settings = json.loads((directory / "config.json").read_text())
    settings |= {"model_type": kind, "num_hidden_layers": NUM_LAYERS, **layout.settings}
    for key in ("layer_types", "mlp_layer_types"):
        if key in settings:
            settings[key] = settings[key][:NUM_LAYERS]
    (directory / "config.json").write_text(json.dumps(settings))
    return _make_plain(model, factors, project, layout.is_token_first)


def _make_plain(model: Any, norms: list[Tensor], project: Tensor, is_token_first: bool) -> PlainHead:
    last = model.model.layers[NUM_LAYERS]
    model.model.layers = model.model.layers[:NUM_LAYERS]
    model.config.num_hidden_layers = NUM_LAYERS
    states = States(model)
    eps = model.config.rms_norm_eps

    def advance(before: Tensor, tokens: Tensor) -> Tensor:
        token, state = rms(states.embedding[tokens], norms[0], eps), rms(before, norms[1], eps)
        x = (torch.cat((token, state) if is_token_first else (state, token), 1) @ project.T)[None]
        positions = torch.arange(len(tokens))[None]
        hidden = torch.full((len(tokens), len(tokens)), -torch.inf).triu(1)[None, None]
        angles = model.model.rotary_emb(x, positions)
        y = last(x, attention_mask=hidden, position_ids=positions, position_embeddings=angles)
        return rms((y[0] if isinstance(y, tuple) else y)[0], norms[2], eps)

    head = model.lm_head.weight.detach()
    ids = torch.arange(len(head))
    return PlainHead(states, lambda inner: inner[-1], advance, lambda after: after @ head.T, ids)
