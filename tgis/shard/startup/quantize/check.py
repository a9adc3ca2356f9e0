"""Checks that engine and platform support `--quantize` and `--cpu-arithmetic`, and computes the memory of
weights."""

import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tgis.config.processes import ShardConfig
from tgis.shard.checkpoint.codes import CodeLayout
from tgis.shard.checkpoint.gguf_memory import GgufMemory, measure_gguf
from tgis.shard.checkpoint.opening import count_elements
from tgis.shard.checkpoint.tensors import DTYPES
from tgis.shard.models.interface import UnsupportedModelError
from tgis.shard.models.sensitive_weights import measure_sensitive_share
from tgis.shard.models.spec import Spec
from tgis.shard.quant.interface import Scheme
from tgis.shard.quant.registry import find_format, find_scheme
from tgis.shard.startup.engine_choice import NATIVE, Choice
from tgis.shard.startup.platforms.interface import DeviceError, Platform

logger = logging.getLogger(__name__)

MIB = 1 << 20


def check_engine(config: ShardConfig, choice: Choice) -> None:
    """Raise UnsupportedModelError if the engine supports neither the quantization nor the arithmetic."""
    if choice.is_native:
        return
    if find_scheme(config.quantize).layout is not None:
        raise UnsupportedModelError(f"--quantize {config.quantize} needs {NATIVE}, not {choice.engine}")
    if config.cpu_arithmetic == "bfloat16":
        raise UnsupportedModelError(
            f"--cpu-arithmetic {config.cpu_arithmetic} needs {NATIVE}, not {choice.engine}"
        )


def find_layout(config: ShardConfig, settings: Mapping[str, Any]) -> CodeLayout | None:
    """Return the most frequent code layout of a model's weights, or None if they are not quantized.
    `settings` is its config.json."""
    directory = Path(config.model_path)
    if (layout := find_scheme(config.quantize).layout) is not None:
        return layout
    if (gguf := _find_gguf(config)) is not None:
        return gguf.main_layout
    format = find_format(settings, directory)
    return format.layout if format else None


def _find_gguf(config: ShardConfig) -> GgufMemory | None:
    """Return the matrices of a GGUF file, or None if `--quantize` rounds them or the model has no such
    file."""
    is_rounded = find_scheme(config.quantize).layout is not None
    return None if is_rounded else measure_gguf(Path(config.model_path))


def check_platform(quantize: str | None, on: Platform) -> None:
    """Raise DeviceError if the platform cannot compute with this quantization."""
    layout = find_scheme(quantize).layout
    if layout is not None and layout.rounds_activations and on.kernels.find_code_packer(layout) is None:
        raise DeviceError(
            f"--quantize {quantize} needs products of codes, which this device lacks; set --device cpu"
        )


def name_weight_type(config: ShardConfig, settings: Mapping[str, Any], on: Platform, dtype_name: str) -> str:
    """Return the name of the type in which the weights of linear layers are stored. Log whether they are
    rounded to it, and how quantized weights are computed."""
    layout = find_layout(config, settings)
    if layout is not None and _has_products(on, layout):
        if (gguf := _find_gguf(config)) is not None:
            return _name_gguf_type(gguf, on, dtype_name)
        logger.info("the weights of linear layers are stored as %d-bit codes", max(layout.bits, 4))
        return config.quantize or ("fp8" if layout.dtype.is_floating_point else f"int{layout.bits}")
    if on.product_dtype is not None and on.product_dtype != DTYPES[dtype_name]:
        [rounded_name] = [name for name, dtype in DTYPES.items() if dtype == on.product_dtype]
        logger.info("the %s weights of matrix products are rounded to %s", dtype_name, rounded_name)
        dtype_name = rounded_name
    if layout is None:
        return dtype_name
    if find_scheme(config.quantize).layout is not None:
        logger.warning(
            "--quantize %s rounds the weights but stores them as %s, with the memory and speed of "
            "--dtype %s, because this platform has no matrix products for their codes",
            config.quantize,
            dtype_name,
            dtype_name,
        )
    else:
        logger.info(
            "the weights of this quantized checkpoint are stored as %s, with the memory and speed of "
            "--dtype %s, because this platform has no matrix products for their codes",
            dtype_name,
            dtype_name,
        )
    return dtype_name


def _name_gguf_type(gguf: GgufMemory, on: Platform, dtype_name: str) -> str:
    """Return the most frequent type. Log the types and their memory, and warn of those that are not stored as
    codes."""
    float_bytes = (on.product_dtype or DTYPES[dtype_name]).itemsize
    num_bytes = gguf.count_bytes(partial(_has_products, on), float_bytes, on.kernels.count_code_bytes)
    logger.info(
        "the weights are stored as the GGUF file's codes and take %.0f MiB without the tokenizer: %s",
        num_bytes / MIB,
        ", ".join(gguf.list_shares()),
    )
    for type, count in gguf.list_widened(partial(_has_products, on)):
        logger.warning(
            "weights of type %s are stored as %s, because this platform has no matrix products for their "
            "codes: they take %.1f MiB instead of %.1f MiB",
            type.name,
            dtype_name,
            count * DTYPES[dtype_name].itemsize / MIB,
            count * type.block_bytes / type.block_elements / MIB,
        )
    return gguf.main_type


def _has_products(on: Platform, layout: CodeLayout) -> bool:
    return on.kernels.find_code_packer(layout) is not None


def count_bytes(
    config: ShardConfig, settings: Mapping[str, Any], choice: Choice, on: Platform, dtype: torch.dtype
) -> int:
    """Return the size of a checkpoint's weights on all ranks together. `settings` is its config.json."""
    directory = Path(config.model_path)
    count = on.kernels.count_code_bytes
    product_bytes = (on.product_dtype or dtype).itemsize
    if (gguf := _find_gguf(config)) is not None:
        return gguf.count_bytes(partial(_has_products, on), product_bytes, count)
    elements = count_elements(directory, find_format(settings, directory))
    table = choice.table_elements
    layout = find_layout(config, settings)
    if layout is None or not _has_products(on, layout):
        return elements * product_bytes + table * max(0, dtype.itemsize - product_bytes)
    if layout.rounds_activations:
        # The embedding counts twice: in its own type, and as codes for a head that may be derived from it.
        return int(elements * count(layout)) + table * dtype.itemsize
    # Here too, the embedding counts twice, because the head may be a separate copy of it.
    scheme = find_scheme(config.quantize)
    if scheme.layout is None:
        return int((elements - table) * count(layout)) + table * (dtype.itemsize + product_bytes)
    share = measure_sensitive_share(choice.spec) if isinstance(choice.spec, Spec) else 0.0
    table_bytes = _count_table_bytes(scheme, on, dtype.itemsize, product_bytes)
    return int((elements - table) * scheme.count_bytes_per_weight(share, count) + table * table_bytes)


def _count_table_bytes(scheme: Scheme, on: Platform, dtype_bytes: int, product_bytes: int) -> float:
    """Return the bytes per element of the embedding and of a head that may be derived from it."""
    layout = scheme.table_layout
    if layout is None:
        return dtype_bytes + product_bytes
    code_bytes = on.kernels.count_code_bytes(layout)
    return code_bytes + (dtype_bytes if on.kernels.find_table_packer(layout) is None else code_bytes)
