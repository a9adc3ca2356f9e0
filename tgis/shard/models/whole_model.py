"""Code shared by the engines that run a model with another library: transformers and ONNX Runtime."""

import logging
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tgis.shard.collectives import ProcessGroup

logger = logging.getLogger(__name__)


class NotServedError(Exception):
    """Reason why a model cannot be served, worded to end the sentence of the error that is reported."""


@dataclass(frozen=True, kw_only=True)
class WholeModelSpec:
    """Shape of the model. Every rank holds all heads, so `num_kv_heads` counts them once per rank."""

    is_encoder_decoder: ClassVar = False
    rope_switch_len: ClassVar = 0

    num_layers: int
    num_heads: int = 1  # of queries, counted like `num_kv_heads`; only GPUs read it
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int = 0

    @property
    def num_cache_layers(self) -> int:
        return self.num_layers


def warn_of_copies(group: ProcessGroup) -> None:
    if group.size > 1 and group.rank == 0:
        logger.warning(
            "each of the %d shards holds the whole model and computes all of it; one shard uses the machine "
            "better",
            group.size,
        )


def choose_tokens(vocab_size: int, count: int) -> Tensor:
    """Return token ids, int64 [count], from the middle of the vocabulary, away from the special tokens at its
    ends."""
    return (vocab_size // 3 + 7 * torch.arange(count)) % vocab_size


def scores_agree(scores: Tensor, expected: Tensor, tolerance: float) -> bool:
    """Return True if no score differs by more than `tolerance` times the largest magnitude. NaN never
    agrees."""
    bound = tolerance * expected.abs().max().clamp(min=1.0)
    return scores.shape == expected.shape and bool((scores - expected).abs().max() <= bound)
