"""Builds a model on the meta device to learn the shapes that adapters must match."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tgis.shard.checkpoint.tensors import ALL, FloatsOnly, Stored
from tgis.shard.checkpoint.weights import Weights
from tgis.shard.collectives import CPU, ProcessGroup
from tgis.shard.kernels.portable.ops import TorchKernels
from tgis.shard.layers.ops import Parts
from tgis.shard.models import registry
from tgis.shard.models.decoder import Decoder
from tgis.shard.models.encoder_decoder import EncoderDecoderModel

META = torch.device("meta")


def build_skeleton(
    path: Path, config: Mapping[str, Any], dtype: torch.dtype
) -> Decoder | EncoderDecoderModel:
    """Return a model without weights, built from the files' headers. Its `parts` can read weights as `dtype`.

    Raises UnsupportedModelError, WeightsError."""
    spec = registry.make_spec(config)
    shapes = registry.open_weights(path, config, spec, MetaWeights)
    model = registry.build(spec, Parts(ProcessGroup(0, 1), shapes, torch.float32, TorchKernels(META)))
    weights = registry.open_weights(path, config, spec)
    cuts = model.parts.cuts
    for module, cut in cuts.items():
        weights.find_matrix(module, cut.shape)  # records in `weights` how the matrix is stored
    model.parts = Parts(ProcessGroup(0, 1), weights, dtype, TorchKernels(CPU), cuts)
    return model


class MetaWeights(Weights):
    """Weights on the meta device: shapes without elements."""

    def find(self, path: str, shape: tuple[int, ...]) -> Stored:
        stored = super().find(path, shape)
        return _MetaTensor(stored.shape, stored.label)


class _MetaTensor(FloatsOnly):
    def __init__(self, shape: tuple[int, ...], label: str):
        self.shape = shape
        self.label = label

    def read(self, rows: slice = ALL, columns: slice = ALL) -> Tensor:
        whole = torch.empty(self.shape, device=META)
        return whole[rows, columns] if len(self.shape) > 1 else whole[rows]
