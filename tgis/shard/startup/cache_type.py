"""Chooses the type of the KV cache."""

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
from tgis.shard.quant.formats.settings import read_settings
from tgis.shard.startup.engine_choice import ONNX, Choice
from tgis.shard.startup.platform import DeviceError, Platform

logger = logging.getLogger(__name__)

FLOAT8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


@dataclass(frozen=True)
class CacheType:
    name: str
    dtype: torch.dtype
    scales: Sequence[CacheScale] = ()  # of each layer, or none


def choose_cache_type(
    config: ShardConfig, settings: Mapping[str, Any], choice: Choice, on: Platform, dtype_name: str
) -> CacheType:
    """Return the type that `--kv-cache-dtype` asks for, or the platform's, or that of `dtype_name`.

    `settings` is the model's config.json. Raises UnsupportedModelError, DeviceError and WeightsError."""
    name, directory = CACHE_TYPES[config.kv_cache_dtype], Path(config.model_path)
    if name is None:
        if on.cache_dtype is not None:
            [dtype_name] = [each for each, dtype in DTYPES.items() if dtype == on.cache_dtype]
        if _was_made_for_float8(settings, directory) and on.device.type == "cpu":
            logger.info(
                "keys and values are kept as %s; the checkpoint was made for 8 bits, which --kv-cache-dtype "
                "fp8_e4m3 selects",
                dtype_name,
            )
        return CacheType(dtype_name, DTYPES[dtype_name])
    if choice.engine == ONNX:
        raise UnsupportedModelError(
            f"--kv-cache-dtype {config.kv_cache_dtype} is not for {ONNX}: leave the option out"
        )
    if on.device.type != "cpu":
        raise DeviceError(
            f"--kv-cache-dtype {config.kv_cache_dtype} works on the CPU only: leave the option out, or give "
            "--device cpu"
        )
    return CacheType(name, FLOAT8[name], _read_scales(name, directory, choice))


def _was_made_for_float8(settings: Mapping[str, Any], directory: Path) -> bool:
    quantization = read_settings(settings, directory)
    if quantization is None:
        return False
    scheme = quantization.section("kv_cache_scheme")
    return scheme.text("type", "") == "float" and scheme.number("num_bits") == 8


def _read_scales(name: str, directory: Path, choice: Choice) -> list[CacheScale]:
    num_layers = choice.spec.num_layers
    # The cache of an encoder-decoder has layers of self-attention and of cross attention.
    found: list[CacheScale | None] = [None] * num_layers
    if not choice.spec.is_encoder_decoder:
        found = read_cache_scales(directory, num_layers)
    missing = found.count(None)
    if not missing:
        logger.info("keys and values are kept as %s, with the checkpoint's scales", name)
    else:
        logger.info(
            "keys and values are kept as %s; their scales are 1 in %d of %d layers, for which the checkpoint "
            "has none",
            *(name, missing, num_layers),
        )
    return [scale or CacheScale() for scale in found]
