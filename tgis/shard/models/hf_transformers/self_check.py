"""Checks with a few tokens that a model returns the same logits with this service's cache as with its own."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from tgis.shard.attention.interface import StepLayout
from tgis.shard.collectives import ProcessGroup
from tgis.shard.kernels.cpu.attention.attention import CpuAttention
from tgis.shard.memory.kv_cache import KVCache, local_kv_heads
from tgis.shard.models.hf_transformers.attention_hook import AttentionHook, CallRecorder
from tgis.shard.models.hf_transformers.model import TransformersModel, compute_states, read_logits
from tgis.shard.models.interface import StepInputs
from tgis.shard.models.whole_model import NotServedError, choose_tokens, scores_agree

LENGTHS = (14, 9)  # tokens of two sequences
# (sequence, start, end) of the tokens of each step: first chunks, later chunks and single tokens.
STEPS = (((0, 0, 5),), ((0, 5, 12), (1, 0, 8)), ((1, 8, 9), (0, 12, 14)))
BLOCK_SIZE = 4
TABLES = ((3, 5, 1, 7), (2, 0, 4, 6))
# Maximum difference, relative to the largest score. Reordered float32 arithmetic stays far below.
TOLERANCE = 2e-4


def choose_sequences(vocab_size: int) -> list[Tensor]:
    return list(torch.split(choose_tokens(vocab_size, sum(LENGTHS)), list(LENGTHS)))


def score_alone(whole: nn.Module, token_ids: Tensor) -> Tensor:
    """Return logits of the model's unmodified code, float32 [num_tokens, vocab_size]."""
    return read_logits(whole(input_ids=token_ids[None], use_cache=True))


def check_scores(
    model: TransformersModel, group: ProcessGroup, sequences: list[Tensor], expected: list[Tensor]
) -> None:
    """Check the logits of packed chunks of sequences. Raises NotServedError."""
    spec = model.spec
    num_blocks = sum(map(len, TABLES))
    shape = (BLOCK_SIZE, local_kv_heads(spec, group), spec.head_dim)
    attention = CpuAttention(KVCache(spec.num_cache_layers, num_blocks, *shape, torch.float32))
    for step in STEPS:
        ids = torch.cat([sequences[i][start:end] for i, start, end in step])
        layout = _make_layout(step)
        inputs = StepInputs(ids, layout.positions, layout, attention.plan(layout, "self"))
        x = model.forward(inputs, attention)
        expected_scores = torch.cat([expected[i][start:end] for i, start, end in step])
        if not scores_agree(model.logits(x), expected_scores, TOLERANCE):
            raise NotServedError(
                "its scores change if sequences are packed and split, so its code depends on more than "
                "keys, values and plain positions"
            )


def check_positions(hook: AttentionHook, decoder: nn.Module, token_ids: Tensor, length: int) -> int:
    """Return the number of the model's positions: `length`, or 0 if there is no limit.

    Raises NotServedError if its code ignores `position_ids`."""
    token_ids = token_ids[: length - 1]
    start = length - len(token_ids)

    def compute(token_ids: Tensor, start: int, **more: Any) -> Tensor:
        positions = torch.arange(start, start + len(token_ids))
        forward = partial(compute_states, decoder, token_ids, positions, **more)
        states: Tensor = hook.call(CallRecorder(length), forward)[0]
        return states

    with_positions = compute(token_ids, start)
    try:
        without_positions = compute(token_ids, start, past_key_values=_cache_without_tokens(start))
    except (LookupError, AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise NotServedError("its code needs its own cache") from error
    if not scores_agree(without_positions, with_positions, TOLERANCE):
        raise NotServedError("its code reads positions from its own cache")
    try:
        compute(token_ids[:1], length)
    except (IndexError, RuntimeError):
        return length
    return 0


def _cache_without_tokens(length: int) -> Any:
    cache = DynamicCache()  # reports `length` tokens but holds none
    cache.get_seq_length = lambda *_, **__: length
    cache.update = lambda k, v, *_, **__: (k, v)
    return cache


def _make_layout(step: tuple[tuple[int, int, int], ...]) -> StepLayout:
    counts = [0] + [end - start for _, start, end in step]
    return StepLayout(
        cu_seqlens_q=torch.tensor(counts).cumsum(0).to(torch.int32),
        positions=torch.cat([torch.arange(start, end) for _, start, end in step]),
        seq_lens=torch.tensor([end for _, _, end in step], dtype=torch.int32),
        block_tables=torch.tensor([TABLES[i] for i, _, _ in step], dtype=torch.int32),
    )
