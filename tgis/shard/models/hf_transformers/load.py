"""Loads models that no family of this service covers: transformers' modelling code runs them with this
service's attention and cache.

Importing transformers takes seconds, so it is imported only when such a model is described."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tgis.hub import model_files
from tgis.shard.collectives import World
from tgis.shard.layers.rotary import DynamicScaling, LongScaling
from tgis.shard.models.families import falcon
from tgis.shard.models.interface import Model, ModelSpec, UnsupportedModelError
from tgis.shard.models.spec import DecoderSpec
from tgis.shard.models.whole_model import WholeModelSpec, warn_of_copies


def make_spec(directory: Path, config: Mapping[str, Any], trust_remote_code: bool) -> WholeModelSpec:
    """Return the shape that the configuration implies. `load` finds the actual one.

    This reads no tensor, but runs the checkpoint's configuration code if it is trusted. Raises
    UnsupportedModelError."""
    from tgis.shard.models.hf_transformers import build

    if config.get("quantization_config"):
        raise UnsupportedModelError("quantized checkpoints are not supported")
    with build.as_unsupported(config.get("model_type")):
        parsed = build.read_config(directory, config, trust_remote_code)
        text = parsed.get_text_config(decoder=True)
        heads = _largest(text, "num_attention_heads") or 1
        return WholeModelSpec(
            num_layers=_largest(text, "num_hidden_layers") or 1,
            num_kv_heads=_largest(text, "num_key_value_heads") or heads,
            head_dim=_largest(text, "head_dim") or (_largest(text, "hidden_size") or heads) // heads,
            vocab_size=text.vocab_size,
        )


def find_obstacle(spec: ModelSpec, model_type: str) -> str | None:
    """Return why `load` would refuse a model that a family of this service serves with `spec`, None if no
    reason is known. This reads neither transformers nor the checkpoint."""
    if not isinstance(spec, DecoderSpec):
        return "it is an encoder-decoder"
    if spec.slopes:
        return "it has ALiBi"
    if model_type in falcon.MODEL_TYPES:
        return "its code does not use the attention interface"
    if spec.rope and isinstance(spec.rope.scaling, DynamicScaling | LongScaling):
        return "its rotary embedding lets sequences of one step affect each other"
    return None


def load(
    directory: Path, spec: WholeModelSpec, world: World, dtype: torch.dtype, trust_remote_code: bool
) -> Model:
    """Load the model with weights rounded to `dtype`.

    A few tokens are computed first, to check that the model's scores with this service's cache are those of
    its own code. The model's `spec` is the one that was found.

    Raises UnsupportedModelError and WeightsError."""
    from tgis.shard.models.hf_transformers import build

    warn_of_copies(world)
    with build.as_unsupported(model_files.read_json(directory, "config.json").get("model_type")):
        return build.load_model(directory, spec.vocab_size, world, dtype, trust_remote_code)


def _largest(config: Any, name: str) -> int:
    """Return a number of the configuration: the greatest if layers have their own, 0 if there is none."""
    value = config.to_dict().get(config.attribute_map.get(name, name))
    return max(value, default=0) if isinstance(value, list | tuple) else value or 0
