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


def score_prompt(
    path: Path,
    config: Mapping[str, Any],
    spec: DecoderSpec,
    group: ProcessGroup,
    dtype: torch.dtype,
    token_ids: Sequence[int],
    measured: Sequence[str] = (),
) -> PromptScores:
    """Compute a prompt with the checkpoint's own weights in float32 arithmetic. `dtype` is that of vectors
    and embeddings, `measured` the paths of the layers whose ranges are returned. All ranks must call this.
    Raises WeightsError and ProcessGroupError."""
    weights = registry.open_weights(path, config, spec)
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
    logprobs = logits.log_softmax(-1).gather(1, ids[1:].unsqueeze(1)).squeeze(1).cpu()
    return PromptScores(logprobs, {path: parts.products[path].gather_range(group) for path in measured})


class _StreamingKernels(TorchKernels):
    """Kernels whose products read their weights whenever they are called."""

    def pack(self, weight: Stored, dtype: torch.dtype, role: MatrixRole = "linear") -> Product:
        return _StreamedProduct(weight, self.device)


class _StreamedProduct:
    """Product with a weight that stays in the checkpoint. Remembers the largest magnitudes of its inputs and
    weights."""

    def __init__(self, weight: Stored, device: torch.device):
        self._weight = weight
        self._device = device
        self._largest_input, self._largest_weight = torch.zeros(2, weight.shape[1], device=device)

    def __call__(self, x: Tensor) -> Tensor:
        y = torch.empty(len(x), self._weight.shape[0], device=self._device)
        if not len(x):
            return y
        _raise_to(self._largest_input, x)
        for rows, piece in read_pieces(self._weight, _PIECE):
            wide = piece.to(self._device, torch.float32)
            _raise_to(self._largest_weight, wide)
            y[:, rows] = F.linear(x.float(), wide)
        return y

    def gather_range(self, group: ProcessGroup) -> ChannelRange:
        """Return the range of a weight whose rows are split over ranks. All ranks must call this."""
        weights = group.all_gather(self._largest_weight).view(group.size, -1).amax(0)
        return ChannelRange(self._largest_input.cpu(), weights.cpu())


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
