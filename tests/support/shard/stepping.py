"""Drives a model step by step like a shard: packed sequences, block tables and any split into chunks."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tgis.shard.attention.interface import Attention, StepLayout
from tgis.shard.attention.layered import open_attention
from tgis.shard.collectives import ProcessGroup
from tgis.shard.kernels.cpu.attention.attention import CpuAttention
from tgis.shard.memory.layered_cache import allocate_cache
from tgis.shard.models import registry
from tgis.shard.models.decoder import Decoder
from tgis.shard.models.interface import StepInputs
from tgis.shard.models.parts.states import open_state

ALONE = ProcessGroup(0, 1)
# Block tables of sequences 0, 1, ...: neither contiguous nor in order.
TABLES = [[13, 7, 1, 9, 12, 16], [5, 2, 11, 0, 14, 17], [4, 15, 3, 10, 6, 8], [20, 18, 23, 19, 22, 21]]
NUM_BLOCKS = 24


def read_config(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "config.json").read_text())


def load(directory: Path, group: ProcessGroup = ALONE, dtype: torch.dtype = torch.float32) -> Decoder:
    return registry.load(directory, read_config(directory), group, dtype)


def new_attention(
    model: Decoder, group: ProcessGroup = ALONE, block_size: int = 4, dtype: torch.dtype = torch.float32
) -> Attention:
    return open_attention(allocate_cache(model.spec, group, NUM_BLOCKS, block_size, dtype), CpuAttention)


def make_layout(spans: Sequence[tuple[int, int]], tables: Sequence[list[int]]) -> StepLayout:
    """Return the layout in which token positions [start, end) of each sequence are new."""
    counts = [0] + [end - start for start, end in spans]
    return StepLayout(
        cu_seqlens_q=torch.tensor(counts).cumsum(0).to(torch.int32),
        positions=torch.cat([torch.arange(start, end) for start, end in spans]),
        seq_lens=torch.tensor([end for _, end in spans], dtype=torch.int32),
        block_tables=torch.tensor(tables, dtype=torch.int32),
    )


class Stepper:
    """Model and its cache; `step` computes positions of some sequences and returns their logits."""

    def __init__(
        self,
        model: Decoder,
        group: ProcessGroup = ALONE,
        block_size: int = 4,
        dtype: torch.dtype = torch.float32,
    ):
        self._model = model
        self._attention = new_attention(model, group, block_size, dtype)

    def step(self, work: dict[int, tuple[list[int], int]]) -> dict[int, Tensor]:
        """Compute steps. `work` maps sequences to all their token ids and the first position to compute;
        return logits [num_computed, vocab_size] of each."""
        spans = [(start, len(ids)) for ids, start in work.values()]
        layout = make_layout(spans, [TABLES[i] for i in work])
        ids = torch.tensor([token for ids, start in work.values() for token in ids[start:]])
        inputs = StepInputs(ids, layout.positions, layout, self._attention.plan(layout, "self"))
        x = self._model.forward(inputs, self._attention)
        logits = self._model.logits(x).split([end - start for start, end in spans])
        return dict(zip(work, logits, strict=True))


def compute_mixed_steps(
    group: ProcessGroup, directory: Path, dtype: torch.dtype, cache_dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return the log-probabilities of two sequences in steps with a chunk, a prompt, and both."""
    stepper = Stepper(load(directory, group, dtype), group, dtype=cache_dtype)
    first, second = list(range(5, 20)), [30, 31]
    steps = [{0: (first[:9], 0)}, {0: (first[:14], 9), 1: (second[:1], 0)}, {1: (second, 1), 0: (first, 14)}]
    logits = [torch.cat(list(stepper.step(work).values())) for work in steps]
    return torch.cat(logits).log_softmax(-1)


def compute_prompt(model: Decoder, ids: list[int]) -> Tensor:
    """Return the logits after each token of one sequence, [num_tokens, vocab_size], computed in one step."""
    attention = new_attention(model, block_size=16)
    layout = make_layout([(0, len(ids))], TABLES[:1])
    states = open_state(model.spec, ALONE, len(ids))
    plan = attention.plan(layout, "self")
    inputs = StepInputs(torch.tensor(ids), layout.positions, layout, plan, states=states)
    return model.logits(model.forward(inputs, attention))
