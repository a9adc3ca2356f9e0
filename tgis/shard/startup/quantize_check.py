"""Checks that the platform supports `--quantize`, and counts the memory of quantized weights."""

from pathlib import Path

import torch

from tgis.config.processes import ShardConfig
from tgis.shard.checkpoint.files import count_elements
from tgis.shard.kernels.cpu.int8.product import BYTES_PER_WEIGHT
from tgis.shard.layers.ops import Quantization
from tgis.shard.models.interface import UnsupportedModelError
from tgis.shard.startup.engine_choice import NATIVE, Choice
from tgis.shard.startup.platform import DeviceError, Platform


def read(quantize: str | None) -> Quantization:
    """Return the quantization of an option's value. Values that are never supported are refused earlier."""
    return "int8" if quantize == "int8" else "none"


def check_engine(quantize: str | None, choice: Choice) -> None:
    """Raise UnsupportedModelError if the engine cannot quantize."""
    if read(quantize) != "none" and not choice.is_native:
        raise UnsupportedModelError(f"--quantize {quantize} is for {NATIVE}, not for {choice.engine}")


def check_platform(quantize: str | None, on: Platform) -> None:
    """Raise DeviceError if the platform cannot compute with this quantization."""
    if read(quantize) == "int8" and on.kernels.pack_int8 is None:
        raise DeviceError("--quantize int8 works on the CPU only; --device cpu selects it")


def count_bytes(config: ShardConfig, choice: Choice, dtype: torch.dtype) -> int:
    """Return the size of a checkpoint's weights over all ranks."""
    elements = count_elements(Path(config.model_path))
    if read(config.quantize) == "none":
        return elements * dtype.itemsize
    # The embedding counts twice: in its own type, and as int8 for a head that may be made of it.
    return int(elements * BYTES_PER_WEIGHT) + choice.table_elements * dtype.itemsize
