"""Parts for layers on their own."""

from pathlib import Path

import torch

from tgis.shard.checkpoint.weights import Weights
from tgis.shard.collectives import ProcessGroup
from tgis.shard.kernels.cpu.ops import CPU_KERNELS
from tgis.shard.layers.ops import Parts


def parts(directory: Path, group: ProcessGroup, dtype: torch.dtype = torch.float32) -> Parts:
    return Parts(group, Weights(directory, {"layer": "layer"}), dtype, CPU_KERNELS)
