"""Creates the weights of a Llama of any shape on the device that computes with them, without files."""

from typing import Any

import torch
from torch import Tensor

from bench.gpu.inputs.random_codes import RandomCodes
from bench.shapes import INIT_STD, Shape, model_config
from tgis.shard.checkpoint.codes import CodeLayout
from tgis.shard.checkpoint.provenance import ModuleRows
from tgis.shard.checkpoint.tensors import ALL, FloatsOnly, Stored
from tgis.shard.collectives import ProcessGroup
from tgis.shard.layers.ops import Kernels, Parts
from tgis.shard.models import registry
from tgis.shard.models.decoder import Decoder


class RandomTensor(FloatsOnly):
    def __init__(self, shape: tuple[int, ...], label: str, device: torch.device):
        self.shape, self.label, self._device = shape, label, device

    def read(self, rows: slice = ALL, columns: slice = ALL) -> Tensor:
        spans = (rows, columns)[: len(self.shape)]
        size = [len(range(*span.indices(length))) for span, length in zip(spans, self.shape, strict=True)]
        if len(size) == 1:  # the weight of a norm
            return torch.ones(size, device=self._device)
        return torch.randn(size, device=self._device).mul_(INIT_STD)


class RandomWeights:
    """Replacement of the checkpoint that a model reads."""

    has_scaled_matrices = False

    def __init__(self, shape: Shape, device: torch.device, layout: CodeLayout | None = None):
        self._shape, self._device = shape, device
        self._layout = layout

    def find(self, path: str, shape: tuple[int, ...]) -> Stored:
        return RandomTensor(shape, path, self._device)

    def find_matrix(self, path: str, shape: tuple[int, int]) -> Stored:
        if self._layout is not None and ".layers." in f".{path}":
            return RandomCodes(self._layout, shape, path, self._device)
        return RandomTensor(shape, path, self._device)

    def trace(self, path: str, shape: tuple[int, int]) -> list[ModuleRows]:
        """Return the modules that make up a matrix."""
        model = self._shape
        q_size, kv_size = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
        packed = {"qkv": [q_size, kv_size, kv_size], "up": [model.intermediate_size] * 2}
        counts = packed.get(path.rpartition(".")[2], [shape[0]])
        return [ModuleRows(f"{path}.{number}", 0, count) for number, count in enumerate(counts)]


def build_model(
    shape: Shape, dtype: torch.dtype, kernels: Kernels, layout: CodeLayout | None = None
) -> Decoder:
    """Return a model whose linear layers have codes of a layout, or weights of `dtype`."""
    weights: Any = RandomWeights(shape, kernels.device, layout)
    model = registry.build(
        registry.make_spec(model_config(shape)), Parts(ProcessGroup(0, 1), weights, dtype, kernels)
    )
    assert isinstance(model, Decoder)
    return model
