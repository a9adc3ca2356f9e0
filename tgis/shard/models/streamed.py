"""Decoder whose weights stay in the checkpoint. Every product reads its weight a few rows at a time and drops
it, so that the whole model needs almost no memory. It computes one prompt to compare another model with, and
measures the ranges of activations."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tgis.shard.attention.interface import StepLayout
from tgis.shard.attention.layered import open_attention
from tgis.shard.checkpoint.tensors import ALL, Sliced, Stored, read_pieces
from tgis.shard.collectives import ProcessGroup
from tgis.shard.kernels.portable.attention import TorchAttention
from tgis.shard.kernels.portable.ops import TorchKernels
from tgis.shard.layers.ops import Parts, Product, Table
from tgis.shard.memory.layered_cache import allocate_cache
from tgis.shard.models import registry
from tgis.shard.models.decoder import Decoder
from tgis.shard.models.interface import StepInputs
from tgis.shard.models.parts.states import open_state
from tgis.shard.models.spec import DecoderSpec
from tgis.shard.quant.interface import MatrixRole
from tgis.shard.quant.smoothing import ChannelRange

_PIECE = 1 << 20  # approximate number of weights read at a time


class PromptScores(NamedTuple):
    logprobs: Tensor  # float32 [num_tokens - 1], of the tokens except the first
    ranges: dict[str, ChannelRange]  # by path of the layer; zeros for experts that no token uses
    mean_squares: dict[str, Tensor]  # of the inputs of each column, float32 [num_columns], by path


def score_prompt(
    path: Path,
    config: Mapping[str, Any],
    spec: DecoderSpec,
    group: ProcessGroup,
    dtype: torch.dtype,
    token_ids: Sequence[int],
    measured: Sequence[str] = (),
    measures_squares: bool = False,
) -> PromptScores:
    """Compute a prompt with the checkpoint's own weights in float32 arithmetic. `dtype` is that of vectors
    and embeddings, `measured` the paths of the layers whose ranges are returned. The mean squares of all
    layers are returned if `measures_squares`. All ranks must call this. Raises WeightsError and
    ProcessGroupError."""
    weights = registry.open_weights(path, config, spec)
    # The model is read again afterwards, to be loaded.
    weights.progress.running = "measuring the weights before they are rounded"
    weights.progress.finished = "weights measured before they are rounded"
    parts = _StreamedParts(group, weights, dtype, _StreamingKernels(group.device))
    model = Decoder(spec, parts)
    ids = torch.tensor(token_ids, device=group.device)
    cache = allocate_cache(spec, group, 1, len(ids), torch.float32, group.device)
    attention = open_attention(cache, TorchAttention)
    layout = StepLayout(
        cu_seqlens_q=torch.tensor([0, len(ids)], dtype=torch.int32),
        positions=torch.arange(len(ids)),
        seq_lens=torch.tensor([len(ids)], dtype=torch.int32),
        block_tables=torch.zeros(1, 1, dtype=torch.int32),
    )
    is_long = torch.full((len(ids),), 0 < spec.rope_switch_len < len(ids), device=group.device)
    plan = attention.plan(layout, "self")
    states = open_state(spec, group, len(ids))
    positions = layout.positions.to(group.device)
    inputs = StepInputs(ids, positions, layout, plan, is_long=is_long, states=states)
    logits = model.logits(model.forward(inputs, attention)[:-1])
    weights.release()
    weights.progress.finish()
    logprobs = logits.log_softmax(-1).gather(1, ids[1:].unsqueeze(1)).squeeze(1).cpu()
    ranges = {path: parts.products[path].gather_range(group) for path in measured}
    squares = {path: each.gather_squares(group) for path, each in parts.products.items() if measures_squares}
    return PromptScores(logprobs, ranges, squares)


class _StreamingKernels(TorchKernels):
    """Kernels whose products read their weights whenever they are called."""

    def pack(self, weight: Stored, dtype: torch.dtype, role: MatrixRole = "linear") -> Product:
        return _StreamedProduct(weight, self.device)


class _StreamedProduct:
    """Product with a weight that stays in the checkpoint. Remembers the largest magnitudes of its inputs and
    weights, and the mean squares of its inputs."""

    def __init__(self, weight: Stored, device: torch.device):
        self._weight = weight
        self._device = device
        self.columns = range(weight.shape[1])  # of the whole matrix
        self.num_columns = weight.shape[1]  # of the whole matrix
        self._num_inputs = 0
        self._square_sum = torch.zeros(weight.shape[1], device=device)
        self._largest_input, self._largest_weight = torch.zeros(2, weight.shape[1], device=device)

    def __call__(self, x: Tensor) -> Tensor:
        y = torch.empty(len(x), self._weight.shape[0], device=self._device)
        if not len(x):
            return y
        _raise_to(self._largest_input, x)
        self._num_inputs += len(x)
        self._square_sum += x.float().square().sum(0)
        for rows, piece in read_pieces(self._weight, _PIECE):
            wide = piece.to(self._device, torch.float32)
            _raise_to(self._largest_weight, wide)
            y[:, rows] = F.linear(x.float(), wide)
        return y

    def gather_range(self, group: ProcessGroup) -> ChannelRange:
        """Return the range of a weight whose rows are split over ranks. All ranks must call this."""
        weights = group.all_gather(self._largest_weight).view(group.size, -1).amax(0)
        return ChannelRange(self._largest_input.cpu(), weights.cpu())

    def gather_squares(self, group: ProcessGroup) -> Tensor:
        """Return the mean squares of the inputs of all columns of the matrix; 0 if there were none. All ranks
        must call this."""
        whole = torch.zeros(self.num_columns, device=self._device)
        whole[self.columns.start : self.columns.stop] = self._square_sum / max(1, self._num_inputs)
        # Ranks have the same inputs, or those of their own columns.
        return group.all_gather(whole).view(group.size, -1).amax(0).cpu()


def _raise_to(largest: Tensor, rows: Tensor) -> None:
    """Set `largest`, [size], to the maximum of itself and the magnitudes of rows, [n, size]."""
    wide = rows.float()
    # Both reductions take a tenth of the time of abs() and one reduction.
    for bound in (wide.amax(0), wide.amin(0).neg()):
        torch.maximum(largest, bound, out=largest)


@dataclass(frozen=True)
class _StreamedParts(Parts):
    """Parts whose weights stay in the checkpoint."""

    products: dict[str, _StreamedProduct] = field(default_factory=dict)

    def pack(
        self,
        role: MatrixRole,
        path: str,
        shape: tuple[int, int],
        rows: Sequence[slice] = (ALL,),
        columns: slice = ALL,
    ) -> Product:
        product = super().pack(role, path, shape, rows, columns)
        assert isinstance(product, _StreamedProduct)
        product.columns = range(shape[1])[columns]
        product.num_columns = shape[1]
        self.products[path] = product
        return product

    def open_table(self, path: str, shape: tuple[int, int], rows: slice = ALL) -> Table:
        stored = Sliced(self.weights.find_matrix(path, shape), rows)
        return _StreamedTable(stored, self.dtype, self.kernels.device)


class _StreamedTable:
    def __init__(self, stored: Stored, dtype: torch.dtype, device: torch.device):
        self.num_rows, self.width = stored.shape
        self._stored = stored
        self._dtype = dtype
        self._device = device

    def look_up(self, ids: Tensor) -> Tensor:
        rows = [self._stored.read(slice(i, i + 1)) for i in ids.tolist()]
        return torch.cat(rows).to(self._device, self._dtype).float()
