"""Runs windows of text through a decoder block by block, so that only one block is in memory at a time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from tgis.shard.attention.interface import AttentionPlan, Heads, Scoring, StepLayout
from tgis.shard.checkpoint.weights import Weights
from tgis.shard.kernels.portable.attention import TorchAttention
from tgis.shard.kernels.portable.ops import TorchKernels
from tgis.shard.memory.kv_cache import KVCache
from tgis.shard.models.decoder import AnyBlock, Decoder, StepContext, make_block
from tgis.shard.models.interface import StepInputs
from tgis.shard.models.parts.states import open_state
from tgis.shard.models.spec import DecoderSpec
from tgis.shard.quantize.plan import ALONE, LinearMatrix, LinearParts

BLOCK_SIZE = 16
LOGITS_ROWS = 256  # rows of logits computed at once


@dataclass
class Windows:
    """Hidden states of windows of text between two blocks, float32 [num_tokens, hidden_size] each, on the
    CPU."""

    token_ids: Sequence[Sequence[int]]
    states: list[Tensor] = field(default_factory=list)


class LayerSteps:
    """Runs steps of one window each. The weights of a block, or of embedding and head, are read as float32
    when they are needed."""

    def __init__(self, spec: DecoderSpec, weights: Weights, device: torch.device):
        self._spec = spec
        self._weights = weights
        self._kernels = TorchKernels(device)
        self._contexts: dict[int, StepContext] = {}  # by the number of tokens

    def embed(self, *streams: Windows) -> None:
        """Set the states of windows to the input of the first block."""
        ends = self._read_ends()
        for windows in streams:
            for ids in windows.token_ids:
                inputs, attention = self._open_window(torch.tensor(ids))
                x, context = ends.embed(inputs, attention)
                self._contexts.setdefault(len(ids), context)
                windows.states.append(x.cpu())

    def read_block(self, layer: int) -> tuple[AnyBlock, dict[str, LinearMatrix]]:
        """Return a block and its linear layers by path. Raises WeightsError."""
        parts = self._make_parts()
        block = make_block(self._spec, parts, layer)
        self._weights.release()
        return block, parts.matrices

    def run(self, block: AnyBlock, windows: Windows) -> Iterator[Tensor]:
        """Yield the block's output for each window without changing the states."""
        for state in windows.states:
            x = state.to(self._kernels.device, copy=True)
            context = self._contexts[len(x)]
            if context.states is not None:
                context.states.cache.clear(0)  # a window is a new sequence
            x, delta = block(x, None, context)
            yield (x if delta is None else x + delta).cpu()

    def advance(self, block: AnyBlock, windows: Windows) -> None:
        windows.states = list(self.run(block, windows))

    def losses(self, *streams: Windows) -> list[float]:
        """Return the mean loss, in nats per token, of each stream. The first token of a window has no loss.
        The states must be those after the last block."""
        ends = self._read_ends()
        return [self._loss(ends, windows) for windows in streams]

    def _loss(self, ends: Decoder, windows: Windows) -> float:
        total = 0.0
        count = 0
        for ids, state in zip(windows.token_ids, windows.states, strict=True):
            targets = torch.tensor(ids[1:], device=self._kernels.device)
            rows = state[:-1].to(self._kernels.device)
            for x, expected in zip(
                torch.split(rows, LOGITS_ROWS), torch.split(targets, LOGITS_ROWS), strict=True
            ):
                total += F.cross_entropy(ends.logits(x), expected, reduction="sum").item()
            count += len(targets)
        return total / count

    def _read_ends(self) -> Decoder:
        """Return the model without its blocks."""
        ends = Decoder(replace(self._spec, num_layers=0), self._make_parts())
        self._weights.release()
        return ends

    def _make_parts(self) -> LinearParts:
        return LinearParts(ALONE, self._weights, torch.float32, self._kernels)

    def _open_window(self, token_ids: Tensor) -> tuple[StepInputs, "OneLayerAttention"]:
        """Return the inputs and the attention of a step that computes a window as a new sequence."""
        spec = self._spec
        count = len(token_ids)
        device = self._kernels.device
        num_blocks = -(-count // BLOCK_SIZE)
        sizes = (1, num_blocks, BLOCK_SIZE, spec.num_kv_heads, spec.head_dim)
        attention = OneLayerAttention(KVCache(*sizes, torch.float32, device))
        layout = StepLayout(
            cu_seqlens_q=torch.tensor([0, count], dtype=torch.int32),
            positions=torch.arange(count),
            seq_lens=torch.tensor([count], dtype=torch.int32),
            block_tables=torch.arange(num_blocks, dtype=torch.int32).unsqueeze(0),
        )
        is_long = torch.full((count,), 0 < spec.rope_switch_len < count, device=device)
        plan = attention.plan(layout, "self")
        positions = layout.positions.to(device)
        states = open_state(spec, replace(ALONE, device=device), count)
        inputs = StepInputs(token_ids.to(device), positions, layout, plan, is_long=is_long, states=states)
        return inputs, attention


class OneLayerAttention(TorchAttention):
    """Attention whose layers share a cache of one layer, which each of them overwrites."""

    def run(
        self,
        layer: int,
        qkv: Tensor,
        heads: Heads,
        angles: Tensor | None,
        plan: AttentionPlan,
        scoring: Scoring,
    ) -> Tensor:
        return super().run(0, qkv, heads, angles, plan, scoring)
