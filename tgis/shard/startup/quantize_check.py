"""Checks that the platform supports `--quantize`, and counts the memory of weights."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tgis.config.processes import ShardConfig
from tgis.shard.checkpoint.files import count_elements
from tgis.shard.models.interface import UnsupportedModelError
from tgis.shard.quant.registry import find_format, find_scheme
from tgis.shard.startup.engine_choice import NATIVE, Choice
from tgis.shard.startup.platform import DeviceError, Platform


def check_engine(quantize: str | None, choice: Choice) -> None:
    """Raise UnsupportedModelError if the engine cannot quantize."""
    if find_scheme(quantize).layout is not None and not choice.is_native:
        raise UnsupportedModelError(f"--quantize {quantize} is for {NATIVE}, not for {choice.engine}")


def check_platform(quantize: str | None, on: Platform) -> None:
    """Raise DeviceError if the platform cannot compute with this quantization."""
    layout = find_scheme(quantize).layout
    if layout is not None and layout not in on.kernels.code_packers:
        raise DeviceError(f"--quantize {quantize} works on the CPU only; --device cpu selects it")


def count_bytes(
    config: ShardConfig, settings: Mapping[str, Any], choice: Choice, on: Platform, dtype: torch.dtype
) -> int:
    """Return the size of a checkpoint's weights over all ranks. `settings` is its config.json."""
    directory = Path(config.model_path)
    scheme, format = find_scheme(config.quantize), find_format(settings, directory)
    elements = count_elements(directory, format)
    layout = scheme.layout or (format.layout if format else None)
    if layout is None or layout not in on.kernels.code_packers:
        return elements * dtype.itemsize
    # The embedding counts twice: in its own type, and as codes for a head that may be made of it.
    return int(elements * layout.bytes_per_weight) + choice.table_elements * dtype.itemsize
