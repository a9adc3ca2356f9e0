"""Checks that engine and platform support `--quantize` and `--cpu-arithmetic`, and counts the memory of
weights."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tgis.config.processes import ShardConfig
from tgis.shard.checkpoint.files import count_elements
from tgis.shard.checkpoint.tensors import DTYPES
from tgis.shard.models.interface import UnsupportedModelError
from tgis.shard.quant.registry import find_format, find_scheme
from tgis.shard.startup.engine_choice import NATIVE, Choice
from tgis.shard.startup.platform import DeviceError, Platform

logger = logging.getLogger(__name__)


def check_engine(config: ShardConfig, choice: Choice) -> None:
    """Raise UnsupportedModelError if the engine cannot quantize, or has no such arithmetic."""
    if choice.is_native:
        return
    if find_scheme(config.quantize).layout is not None:
        raise UnsupportedModelError(f"--quantize {config.quantize} is for {NATIVE}, not for {choice.engine}")
    if config.cpu_arithmetic != "float32":
        raise UnsupportedModelError(
            f"--cpu-arithmetic {config.cpu_arithmetic} is for {NATIVE}, not for {choice.engine}"
        )


def check_platform(quantize: str | None, on: Platform) -> None:
    """Raise DeviceError if the platform cannot compute with this quantization."""
    layout = find_scheme(quantize).layout
    if layout is not None and layout.rounds_activations and layout not in on.kernels.code_packers:
        raise DeviceError(f"--quantize {quantize} works on the CPU only; --device cpu selects it")


def name_kept_type(config: ShardConfig, settings: Mapping[str, Any], on: Platform, dtype_name: str) -> str:
    """Return the name of the type in which linear layers are kept. Log if they are rounded to it, and if they
    were or are rounded to codes that are not kept."""
    if on.product_dtype is not None and on.product_dtype != DTYPES[dtype_name]:
        [rounded_name] = [name for name, dtype in DTYPES.items() if dtype == on.product_dtype]
        logger.info("the %s weights of matrix products are rounded to %s", dtype_name, rounded_name)
        dtype_name = rounded_name
    scheme, format = find_scheme(config.quantize), find_format(settings, Path(config.model_path))
    if scheme.layout in on.kernels.code_packers:
        return config.quantize or dtype_name
    if scheme.layout is not None:
        logger.warning(
            "--quantize %s rounds the weights, which are then kept as %s: memory and speed are those of "
            "--dtype %s, because this version has no products for their codes",
            *(config.quantize, dtype_name, dtype_name),
        )
    elif format is not None and format.layout not in on.kernels.code_packers:
        logger.info(
            "the weights of this quantized checkpoint are kept as %s: memory and speed are those of --dtype "
            "%s, because this version has no products for their codes",
            *(dtype_name, dtype_name),
        )
    return dtype_name


def count_bytes(
    config: ShardConfig, settings: Mapping[str, Any], choice: Choice, on: Platform, dtype: torch.dtype
) -> int:
    """Return the size of a checkpoint's weights over all ranks. `settings` is its config.json."""
    directory = Path(config.model_path)
    scheme, format = find_scheme(config.quantize), find_format(settings, directory)
    elements = count_elements(directory, format)
    layout = scheme.layout or (format.layout if format else None)
    if layout is None or layout not in on.kernels.code_packers:
        product_bytes = (on.product_dtype or dtype).itemsize
        return elements * product_bytes + choice.table_elements * max(0, dtype.itemsize - product_bytes)
    # The embedding counts twice: in its own type, and as codes for a head that may be made of it.
    return int(elements * layout.bytes_per_weight) + choice.table_elements * dtype.itemsize
