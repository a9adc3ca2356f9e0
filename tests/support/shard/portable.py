"""The platform of plain torch operators on any device."""

from dataclasses import replace

import torch

from tgis.shard.kernels.portable.attention import TorchAttention
from tgis.shard.kernels.portable.ops import TorchKernels
from tgis.shard.startup.platform import ON_CPU, Platform


def plain(device: torch.device) -> Platform:
    return replace(
        ON_CPU, device=device, kernels=TorchKernels(device), attention=TorchAttention, captures_steps=False
    )
