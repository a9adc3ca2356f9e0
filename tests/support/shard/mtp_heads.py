"""Tiny checkpoints with heads for multi-token prediction in their published layouts. The plain model of a
head runs the last layer of a model of transformers that has one layer more."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.shard.checkpoints import randomise
from tests.support.shard.draft_heads import PlainHead, States, rms
from tests.support.shard.family_cases.llamas import LATENT_ROPE, glm4_moe, latents, sizes
from tests.support.shard.speculator_scene import EOS, VOCAB_SIZE
from tests.support.tokenizers.trained import write_byte_level

NUM_LAYERS = 2
SIZES: dict[str, Any] = {"num_hidden_layers": NUM_LAYERS + 1, "vocab_size": VOCAB_SIZE, "eos_token_id": EOS}
CONFIGS: dict[str, Callable[[], hf.PretrainedConfig]] = {
    "mimo": lambda: hf.Qwen2Config(**sizes(**SIZES, tie_word_embeddings=False)),
    "deepseek_v3": lambda: hf.DeepseekV3Config(**latents(rope_parameters=dict(LATENT_ROPE), **SIZES)),
    "glm4_moe": lambda: hf.Glm4MoeConfig(**glm4_moe(**SIZES)),
}
MIMO = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
OTHERS = ("enorm", "hnorm", "eh_proj", "shared_head.norm")


def write_mtp(directory: Path, kind: str) -> PlainHead:
    """Write a model with a head. Return the head's plain model."""
    torch.manual_seed(3)
    config = CONFIGS[kind]()
    model: Any = hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomise(model)
    model.save_pretrained(directory)
    write_byte_level(directory, 400)
    layer = f"model.layers.{NUM_LAYERS}."
    begin = "model.mtp_layers.0." if kind == "mimo" else layer
    tensors = load_file(directory / "model.safetensors")
    tensors = {begin + name.removeprefix(layer) if layer in name else name: x for name, x in tensors.items()}
    names = [begin + name for name in (MIMO if kind == "mimo" else OTHERS)]
    width = config.hidden_size
    norms = [1 + 0.2 * torch.randn(width) for _ in range(3)]
    project = 0.2 * torch.randn(width, 2 * width)
    own = dict(zip(names, (norms[0], norms[1], project, norms[2]), strict=True))
    if kind != "mimo":
        own[f"{begin}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        own[f"{begin}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    named = {name if name.endswith("weight") else f"{name}.weight": x for name, x in own.items()}
    save_file(tensors | named, directory / "model.safetensors", {"format": "pt"})
    settings = json.loads((directory / "config.json").read_text())
    settings |= {"model_type": kind, "num_hidden_layers": NUM_LAYERS, "num_nextn_predict_layers": 1}
    for key in ("layer_types", "mlp_layer_types"):
        if key in settings:
            settings[key] = settings[key][:NUM_LAYERS]
    (directory / "config.json").write_text(json.dumps(settings))
    return _make_plain(model, norms, project, is_token_first=kind != "mimo")


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
