"""Decoder whose weights stay in the checkpoint. Every product reads its weight a few rows at a time and drops
it, so that the whole model needs almost no memory. It computes one prompt to compare another model with."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

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
from tgis.shard.models.spec import DecoderSpec
from tgis.shard.quant.interface import MatrixRole

_PIECE = 1 << 20  # approximate number of weights read at a time


def score_prompt(
    path: Path,
    config: Mapping[str, Any],
    spec: DecoderSpec,
    group: ProcessGroup,
    dtype: torch.dtype,
    token_ids: Sequence[int],
) -> Tensor:
    """Return the log-probabilities of a prompt's tokens, except the first, by the checkpoint's own weights in
    float32 arithmetic: float32 [num_tokens - 1]. `dtype` is that of vectors and embeddings. All ranks must
    call this. Raises WeightsError and ProcessGroupError."""
    weights = registry.open_weights(path, config, spec)
    model = Decoder(spec, _StreamedParts(group, weights, dtype, _StreamingKernels(group.device)))
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
    inputs = StepInputs(ids, layout.positions.to(group.device), layout, plan, is_long=is_long)
    logits = model.logits(model.forward(inputs, attention)[:-1])
    weights.release()
    return logits.log_softmax(-1).gather(1, ids[1:].unsqueeze(1)).squeeze(1).cpu()


class _StreamingKernels(TorchKernels):
    """Kernels whose products read their weights whenever they are called."""

    def pack(self, weight: Stored, dtype: torch.dtype, role: MatrixRole = "linear") -> Product:
        def multiply(x: Tensor) -> Tensor:
            y = torch.empty(len(x), weight.shape[0], device=self.device)
            for rows, piece in read_pieces(weight, _PIECE) if len(x) else ():
                y[:, rows] = F.linear(x.float(), piece.to(self.device, torch.float32))
            return y

        return multiply


class _StreamedParts(Parts):
    """Parts whose tables of weights stay in the checkpoint."""

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
