"""Builds a model on the meta device to learn the shapes that soft prompts and adapters must match. It reads
only the headers of the checkpoint's files."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tgis.shard.checkpoint.tensors import ALL, Stored
from tgis.shard.checkpoint.weights import Weights
from tgis.shard.collectives import World
from tgis.shard.kernels.cpu.ops import CPU_KERNELS
from tgis.shard.kernels.portable.ops import TorchKernels
from tgis.shard.layers.ops import Parts
from tgis.shard.models import registry
from tgis.shard.models.decoder import Decoder
from tgis.shard.models.encoder_decoder import EncoderDecoderModel
from tgis.shard.models.spec.spec import DecoderSpec

NOWHERE = torch.device("meta")


@dataclass(frozen=True)
class Outline:
    prompt_width: int
    is_encoder_decoder: bool
    parts: Parts
    """Parts of the model on one rank. Their weights can be read."""


def outline(path: Path, config: Mapping[str, Any], dtype: torch.dtype) -> Outline:
    """Return the outline of the model in directory `path`, with weights rounded to `dtype`.

    Raises UnsupportedModelError, WeightsError."""
    spec = registry.describe(config)
    family = registry.FAMILIES[config["model_type"]]
    sources, prefix = family.sources(spec), getattr(family, "PREFIX", "")
    blank = Parts(World(0, 1), _Shapes(path, sources, prefix), torch.float32, TorchKernels(NOWHERE))
    model = Decoder(spec, blank) if isinstance(spec, DecoderSpec) else EncoderDecoderModel(spec, blank)
    weights = Weights(path, sources, prefix)
    for module, cut in blank.cuts.items():
        weights.find(f"{module}.weight", cut.shape)  # `weights` records what it has found
    return Outline(
        model.prompt_width,
        spec.is_encoder_decoder,
        Parts(World(0, 1), weights, dtype, CPU_KERNELS, blank.cuts),
    )


class _Shapes(Weights):
    """Weights that have shapes but no elements."""

    def find(self, path: str, shape: tuple[int, ...]) -> Stored:
        found = super().find(path, shape)
        return _Shape(found.shape, found.label)


class _Shape:
    def __init__(self, shape: tuple[int, ...], label: str):
        self.shape, self.label = shape, label

    def read(self, rows: slice = ALL, columns: slice = ALL) -> Tensor:
        whole = torch.empty(self.shape, device=NOWHERE)
        return whole[rows, columns] if len(self.shape) > 1 else whole[rows]
