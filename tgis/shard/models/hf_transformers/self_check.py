"""Checks with a few tokens that a model returns the same logits with this service's cache as with its own."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from tgis.shard.attention.interface import StepLayout
from tgis.shard.memory.kv_cache import KVCache
from tgis.shard.models.hf_transformers.arithmetic import Arithmetic
from tgis.shard.models.hf_transformers.attention_hook import (
    AttentionCall,
    AttentionHook,
    CallRecorder,
    cache_shape,
    largest_group,
)
from tgis.shard.models.hf_transformers.model import TransformersModel, compute_states, read_logits
from tgis.shard.models.interface import StepInputs
from tgis.shard.models.whole_model import NotServedError, choose_tokens, scores_agree

LENGTHS = (15, 10)  # tokens of two sequences
# (sequence, start, end) of the tokens of each step: first chunks, later chunks, single tokens beside a chunk,
# and single tokens, which GPUs compute with another kernel.
STEPS = (
    ((0, 0, 5),),
    ((0, 5, 12), (1, 0, 8)),
    ((1, 8, 9), (0, 12, 14)),
    ((0, 14, 15), (1, 9, 10)),
)
TABLES = ((3, 5, 1, 7), (2, 0, 4, 6))


def choose_sequences(vocab_size: int, device: torch.device) -> list[Tensor]:
    token_ids = choose_tokens(vocab_size, sum(LENGTHS)).to(device)
    return list(torch.split(token_ids, list(LENGTHS)))


def score_alone(whole: nn.Module, token_ids: Tensor) -> Tensor:
    """Return logits of the model's unmodified code, float32 [num_tokens, vocab_size]."""
    return read_logits(whole(input_ids=token_ids[None], use_cache=True))


def check_scores(
    model: TransformersModel,
    calls: list[AttentionCall],
    arithmetic: Arithmetic,
    sequences: list[Tensor],
    expected: list[Tensor],
) -> None:
    """Check the logits of packed chunks of sequences. Raises NotServedError."""
    num_blocks = sum(map(len, TABLES)) + 1  # the last one is the dummy block of GPUs
    num_kv_heads, head_dim = cache_shape(calls)
    shape = (arithmetic.block_size, num_kv_heads, head_dim, arithmetic.attention_dtype)
    cache = KVCache(len(calls), num_blocks, *shape, arithmetic.device)
    attention = arithmetic.open_attention(cache, largest_group(calls))
    for step in STEPS:
        ids = torch.cat([sequences[i][start:end] for i, start, end in step])
        layout = _make_layout(step)
        positions = layout.positions.to(arithmetic.device)
        x = model.forward(StepInputs(ids, positions, layout, attention.plan(layout, "self")), attention)
        expected_scores = torch.cat([expected[i][start:end] for i, start, end in step])
        if not scores_agree(model.logits(x), expected_scores, arithmetic.tolerance):
            raise NotServedError(
                "its scores change if sequences are packed and split, so its code depends on more than "
                "keys, values and plain positions"
            )


def find_max_positions(decoder: nn.Module, token_id: Tensor, length: int) -> int:
    """Return the number of the model's positions: `length`, or 0 if there is no limit. The model must be on
    the CPU: a GPU would abort the process at an index out of range.

    token_id: int64 [1]."""
    compute_states(decoder, token_id, torch.tensor([length - 1]))
    try:
        compute_states(decoder, token_id, torch.tensor([length]))
    except (IndexError, RuntimeError):
        return length
    return 0


def check_positions(
    hook: AttentionHook, decoder: nn.Module, token_ids: Tensor, length: int, tolerance: float
) -> None:
    """Check at positions up to `length` that the model's code reads `position_ids`.

    Raises NotServedError."""
    token_ids = token_ids[: length - 1]
    start = length - len(token_ids)
    positions = torch.arange(start, length, device=token_ids.device)

    def compute(**more: Any) -> Tensor:
        forward = partial(compute_states, decoder, token_ids, positions, **more)
        states: Tensor = hook.call(CallRecorder(length, token_ids.device), forward)[0]
        return states

    with_positions = compute()
    try:
        without_positions = compute(past_key_values=_cache_without_tokens(start))
    except (LookupError, AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise NotServedError("its code needs its own cache") from error
    if not scores_agree(without_positions, with_positions, tolerance):
        raise NotServedError("its code reads positions from its own cache")


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
