"""Metadata of a GGUF file that describe a model, and the check that nothing is lost."""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from math import isclose
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tgis.convert.gguf.architectures import ARCHITECTURES, MIXTRAL, OLMO3, Architecture
from tgis.convert.gguf.tensor_names import ROPE_FREQUENCIES, ROPE_LONG, ROPE_SHORT
from tgis.hub import model_files
from tgis.shard.layers.rotary import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    Rope,
    YarnScaling,
    inverse_frequencies,
)
from tgis.shard.models import registry
from tgis.shard.models.spec import DecoderSpec
from tgis.shard.quantize.settings import QuantizeError

Value = str | int | float | bool | list[str] | list[int] | list[float]
Config = Mapping[str, Any]

# `model_type` of config.json -> name and architecture in GGUF files.
_MODEL_TYPES: Mapping[str, tuple[str, Architecture]] = {
    "mixtral": ("llama", MIXTRAL),
    "mistral": ("llama", ARCHITECTURES["llama"]),
    "olmo3": ("olmo2", OLMO3),
    **{each.model_type: (name, each) for name, each in ARCHITECTURES.items()},
}
# Architectures that need metadata which this module does not write.
_NOT_WRITTEN = {"bloom", "falcon", "mpt", "qwen2moe", "glm4moe", "granitehybrid", "gpt-oss", "mistral3"}
_NOT_WRITTEN |= {"mamba2", "nemotron_h", "nemotron_h_moe", "falcon-h1"}
_NOT_WRITTEN |= {"deepseek2", "qwen3next", "gemma4", "llama4"}
WRITTEN = {name: each for name, each in _MODEL_TYPES.items() if each[0] not in _NOT_WRITTEN}
# Keys of config.json -> metadata keys with the same values.
_SCALES = {
    "attention_multiplier": "attention.scale",
    "residual_multiplier": "residual_scale",
    "embedding_multiplier": "embedding_scale",
    "logits_scaling": "logit_scale",
}
_TOLERANCE = 1e-6  # metadata are float32


def find_written(directory: Path, config: Config) -> tuple[str, Architecture]:
    """Return the name and the architecture of a model in GGUF files. Raises QuantizeError."""
    model_type = config.get("model_type")
    if model_type not in WRITTEN:
        raise QuantizeError(
            f"{directory}: models of type {model_type!r} cannot be written as GGUF; supported are: "
            f"{', '.join(sorted(WRITTEN))}"
        )
    return WRITTEN[model_type]


def describe_model(name: str, config: Config, spec: DecoderSpec) -> dict[str, Value]:
    """Return the metadata of an architecture. Some rotary scalings are tensors instead (`rope_factors`)."""
    metadata = {
        "context_length": model_files.max_sequence_length(config),
        "embedding_length": spec.hidden_size,
        "block_count": spec.num_layers,
        "feed_forward_length": _feed_forward_length(spec),
        "attention.head_count": spec.num_heads,
        "attention.head_count_kv": spec.num_kv_heads,
        "attention.key_length": spec.head_dim,
        "attention.value_length": spec.head_dim,
        "vocab_size": spec.vocab_size,
        "attention.layer_norm_epsilon" if spec.norm == "layer" else "attention.layer_norm_rms_epsilon": (
            float(spec.norm_eps)
        ),
        **dict(_describe_rope(spec)),
        **dict(_describe_scores(spec)),
        **{key: float(config[ours]) for ours, key in _SCALES.items() if config.get(ours) is not None},
    }
    if name == "gptneox":
        metadata["use_parallel_residual"] = spec.residual == "parallel"
    return {f"{name}.{key}": value for key, value in metadata.items()}


def _feed_forward_length(spec: DecoderSpec) -> int:
    return spec.intermediate_size or (spec.experts.intermediate_size if spec.experts else 0)


def _describe_rope(spec: DecoderSpec) -> Iterator[tuple[str, Value]]:
    if spec.rope is None:
        return
    yield "rope.freq_base", float(spec.rope.theta)
    yield "rope.dimension_count", spec.rope.dim
    scaling = spec.rope.scaling
    if isinstance(scaling, LinearScaling | YarnScaling):
        yield "rope.scaling.type", "yarn" if isinstance(scaling, YarnScaling) else "linear"
        yield "rope.scaling.factor", float(scaling.factor)
    if isinstance(scaling, YarnScaling | LongScaling):
        yield "rope.scaling.original_context_length", scaling.original_length
    if isinstance(scaling, YarnScaling):
        yield "rope.scaling.yarn_beta_fast", float(scaling.beta_fast)
        yield "rope.scaling.yarn_beta_slow", float(scaling.beta_slow)
    if isinstance(scaling, LongScaling):
        yield "rope.scaling.attn_factor", float(scaling.long_amplitude)
    if spec.local_rope is not None:
        yield "rope.freq_base_swa", float(spec.local_rope.theta)


def _describe_scores(spec: DecoderSpec) -> Iterator[tuple[str, Value]]:
    if spec.experts is not None:
        yield "expert_count", spec.experts.num_experts
        yield "expert_used_count", spec.experts.num_active
        yield "expert_feed_forward_length", spec.experts.intermediate_size
    if windows := {each for each in spec.windows if each is not None}:
        yield "attention.sliding_window", min(windows)
    if spec.attention_soft_cap is not None:
        yield "attn_logit_softcapping", float(spec.attention_soft_cap)
    if spec.logit_soft_cap is not None:
        yield "final_logit_softcapping", float(spec.logit_soft_cap)


def rope_factors(rope: Rope | None) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    """Return the tensors, by name, that represent some rotary scalings in GGUF files."""
    scaling = rope.scaling if rope else None
    if rope is not None and isinstance(scaling, Llama3Scaling):
        plain = inverse_frequencies(Rope(rope.dim, rope.theta))
        factors = (plain / inverse_frequencies(rope))[0].numpy()
        return {f"{ROPE_FREQUENCIES}.weight": factors.astype(np.float32)}
    if isinstance(scaling, LongScaling):
        return {
            f"{ROPE_LONG}.weight": np.array(scaling.long_factors, np.float32),
            f"{ROPE_SHORT}.weight": np.array(scaling.short_factors, np.float32),
        }
    return {}


def check_equal(directory: Path, expected: DecoderSpec, read_back: Config) -> None:
    """Check that the configuration read back from a file describes the same model. Raises QuantizeError."""
    actual = registry.make_spec(read_back)
    for field in fields(expected):
        original = getattr(expected, field.name)
        if not _is_equal(original, getattr(actual, field.name)):
            raise QuantizeError(
                f"{directory}: {field.name} {original} of this model cannot be represented in a GGUF file"
            )


def _is_equal(first: Any, second: Any) -> bool:
    if isinstance(first, Rope) and isinstance(second, Rope):
        return _is_equal_rope(first, second)
    if is_dataclass(first) and type(first) is type(second):
        return all(_is_equal(getattr(first, x.name), getattr(second, x.name)) for x in fields(first))
    if isinstance(first, float) and isinstance(second, int | float):
        return isclose(first, second, rel_tol=_TOLERANCE)
    return bool(first == second)


def _is_equal_rope(first: Rope, second: Rope) -> bool:
    """Compare frequencies and amplitudes, because a list of factors may represent several scalings."""
    if first.dim != second.dim or any(isinstance(x.scaling, DynamicScaling) for x in (first, second)):
        return False
    angles, others = (inverse_frequencies(each).expand(2, -1) for each in (first, second))
    is_same = torch.allclose(angles, others, rtol=_TOLERANCE, atol=0) and _is_equal(
        _amplitudes(first), _amplitudes(second)
    )
    has_switch = not torch.equal(angles[0], angles[1])
    return is_same and (not has_switch or first.switch_len == second.switch_len)


def _amplitudes(rope: Rope) -> tuple[float, float]:
    if isinstance(rope.scaling, LongScaling):
        return round(rope.scaling.short_amplitude, 5), round(rope.scaling.long_amplitude, 5)
    return round(rope.amplitude, 5), round(rope.amplitude, 5)
