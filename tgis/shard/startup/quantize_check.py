"""What `--quantize` means for a shard: who can serve it, and how much memory its weights take."""

from pathlib import Path

import torch

from tgis.config.processes import ShardConfig
from tgis.shard.checkpoint.files import count_elements
from tgis.shard.kernels.cpu.int8.product import BYTES_PER_WEIGHT
from tgis.shard.layers.ops import Quantization
from tgis.shard.startup.engine_choice import Choice
from tgis.shard.startup.platform import DeviceError, Platform


def read(quantize: str | None) -> Quantization:
    """Of an option's value, those that are never served being refused before."""
    return "int8" if quantize == "int8" else "none"


def check(quantize: str | None, on: Platform) -> None:
    """Raises DeviceError."""
    if read(quantize) == "int8" and on.kernels.pack_int8 is None:
        raise DeviceError("--quantize int8 is computed on the CPU only: --device cpu asks for that")


def count_bytes(config: ShardConfig, choice: Choice, dtype: torch.dtype) -> int:
    """Of a checkpoint's weights over all ranks; the embedding, of which a head may be made, counts twice."""
    elements = count_elements(Path(config.model_path))
    if read(config.quantize) == "none":
        return elements * dtype.itemsize
    return int(elements * BYTES_PER_WEIGHT) + choice.table_elements * dtype.itemsize
