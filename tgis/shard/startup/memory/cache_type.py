"""Chooses the data type of the KV cache."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tgis.config.model import CACHE_TYPES
from tgis.config.processes import ShardConfig
from tgis.shard.checkpoint.cache_scales import read_cache_scales
from tgis.shard.checkpoint.tensors import DTYPES
from tgis.shard.memory.kv_cache import CacheScale
from tgis.shard.models.interface import UnsupportedModelError
from tgis.shard.models.spec import DecoderSpec
from tgis.shard.quant.formats.settings import read_settings
from tgis.shard.startup.engine_choice import ONNX, Choice
from tgis.shard.startup.platforms.interface import DeviceError, Platform

logger = logging.getLogger(__name__)

FLOAT8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
INT8 = {"int8": torch.int8}


@dataclass(frozen=True)
class CacheType:
    name: str
    dtype: torch.dtype
    scales: Sequence[CacheScale] = ()  # one per layer, or empty


def find_float8(option: str) -> torch.dtype | None:
    """Return the 8-bit float that `--kv-cache-dtype` sets, or None if it sets none."""
    return FLOAT8.get(CACHE_TYPES[option] or "")


def choose_cache_type(
    config: ShardConfig, settings: Mapping[str, Any], choice: Choice, on: Platform, dtype_name: str
) -> CacheType:
    """Return the type set by `--kv-cache-dtype`, or else the platform's type, or else `dtype_name`.

    `settings` is the model's config.json. Raises UnsupportedModelError, DeviceError and WeightsError."""
    name = CACHE_TYPES[config.kv_cache_dtype]
    directory = Path(config.model_path)
    if name is None:
        if on.cache_dtype is not None:
            [dtype_name] = [each for each, dtype in DTYPES.items() if dtype == on.cache_dtype]
        if _was_made_for_float8(settings, directory):
            logger.info(
                "the KV cache uses %s; the checkpoint is calibrated for 8 bits, which "
                "--kv-cache-dtype fp8_e4m3 selects",
                dtype_name,
            )
        return CacheType(dtype_name, DTYPES[dtype_name])
    if choice.engine == ONNX:
        raise UnsupportedModelError(
            f"--kv-cache-dtype {config.kv_cache_dtype} does not support {ONNX}: remove the option"
        )
    if name in INT8:
        if on.device.type != "cpu":
            raise DeviceError(
                f"--kv-cache-dtype {name} works only on the CPU: remove the option, set fp8_e4m3, or set "
                "--device cpu"
            )
        logger.info("the KV cache uses %s with a scale for each token and head", name)
        return CacheType(name, INT8[name])
    return CacheType(name, FLOAT8[name], _read_scales(name, directory, choice))


def _was_made_for_float8(settings: Mapping[str, Any], directory: Path) -> bool:
    quantization = read_settings(settings, directory)
    if quantization is None:
        return False
    scheme = quantization.section("kv_cache_scheme")
    return scheme.text("type", "") == "float" and scheme.number("num_bits") == 8


def _read_scales(name: str, directory: Path, choice: Choice) -> list[CacheScale]:
    spec = choice.spec
    layers = spec.attention_layers if isinstance(spec, DecoderSpec) else range(spec.num_cache_layers)
    # The cache of an encoder-decoder has layers of self-attention and of cross attention.
    scales: list[CacheScale | None] = [None] * len(layers)
    if not spec.is_encoder_decoder:
        stored = read_cache_scales(directory, max(layers, default=-1) + 1)
        scales = [stored[layer] for layer in layers]
    missing = scales.count(None)
    if not missing:
        logger.info("the KV cache uses %s with the checkpoint's scales", name)
    else:
        logger.info(
            "the KV cache uses %s; the checkpoint has no scales for %d of %d layers, which use 1",
            name,
            missing,
            len(layers),
        )
    return [scale or CacheScale() for scale in scales]
