"""Inputs of layers besides the residual stream: a second embedding of tokens, with a vector per layer."""

import torch
from torch import Tensor

from tgis.shard.layers.activation import find_kernel
from tgis.shard.layers.embedding import Embedding
from tgis.shard.layers.linear import ColumnParallel, Replicated, RowParallel
from tgis.shard.layers.lora import TokenAdapters
from tgis.shard.layers.norm import Norm
from tgis.shard.layers.ops import Activation, Parts
from tgis.shard.models.interface import StepInputs
from tgis.shard.models.parts.blocks import make_norm
from tgis.shard.models.spec import DecoderSpec


class LayerInputEmbedding:
    """Mean, times the root of two, of a token's vectors from the table and a projection of its first
    embedding."""

    def __init__(self, spec: DecoderSpec, parts: Parts):
        inputs = spec.layer_inputs
        assert inputs is not None, "only models with a second embedding have this layer"
        self._shape = spec.num_layers, inputs.width
        width = spec.num_layers * inputs.width
        self._virtual_id = inputs.virtual_token_id
        self._kernels = parts.kernels
        # Scales are rounded to the weights' type, as in training.
        self._scale = torch.tensor(inputs.width**0.5, dtype=parts.dtype).item()
        self._tokens = Embedding(parts, "layer_inputs.embed", inputs.num_rows, width)
        self._project = Replicated(parts, "layer_inputs.project", spec.hidden_size, width)
        self._projection_scale = spec.hidden_size**-0.5
        self._norm = Norm(parts, "layer_inputs.norm", inputs.width, spec.norm_eps, spec.norm)

    def __call__(self, x: Tensor, inputs: StepInputs) -> Tensor:
        """Return float32 [num_tokens, num_layers, width] for embeddings x, [num_tokens, hidden_size]."""
        ids = inputs.token_ids
        if inputs.virtual is not None:
            ids = ids.index_fill(0, inputs.virtual.places, self._virtual_id)
        num_layers, width = self._shape
        y = self._kernels.scale(self._project(x, inputs.adapters), self._projection_scale)
        y = self._norm(y.view(-1, width)).view(-1, num_layers * width)
        own = self._kernels.scale(self._tokens(ids, inputs.adapters), self._scale)
        return self._kernels.scale(self._kernels.add(y, own), 2**-0.5).view(-1, num_layers, width)


class LayerInputBranch:
    """Gated branch of one layer, split over ranks: norm(project(activation(gate(x)) * input))."""

    def __init__(self, spec: DecoderSpec, parts: Parts, path: str, layer: int):
        inputs = spec.layer_inputs
        assert inputs is not None, "only models with a second embedding have this branch"
        self._layer = layer
        self._own = parts.group.slice(inputs.width)
        self._gate = ColumnParallel(parts, f"{path}.input_gate", spec.hidden_size, [inputs.width], False)
        self._project = RowParallel(parts, f"{path}.input_project", inputs.width, spec.hidden_size, False)
        self._norm = make_norm(spec, parts, f"{path}.input_norm")
        self._activation = Activation(find_kernel(spec.activation), is_gated=False)
        self._norm_product = parts.kernels.norm_product

    def __call__(self, x: Tensor, layer_inputs: Tensor, adapters: TokenAdapters | None) -> Tensor:
        """Return the output still to be added to x, [num_tokens, hidden_size]."""
        y = self._norm_product(x, None, None, self._gate, self._activation, adapters)
        y = y * layer_inputs[:, self._layer, self._own]
        return self._norm(self._project(y, adapters))
