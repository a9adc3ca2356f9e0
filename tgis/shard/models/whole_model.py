"""Definitions shared by the engines that run a whole model through another library's code."""

import logging
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tgis.shard.collectives import ProcessGroup

logger = logging.getLogger(__name__)


class NotServedError(Exception):
    """Reason why a model is not served. The text is the end of a sentence."""


@dataclass(frozen=True, kw_only=True)
class WholeModelSpec:
    """Shape of the model. Every rank holds it all, so key/value heads are counted once for each rank."""

    is_encoder_decoder: ClassVar = False
    rope_switch_len: ClassVar = 0

    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int = 0


def warn_of_copies(group: ProcessGroup) -> None:
    if group.size > 1 and group.rank == 0:
        logger.warning(
            "each of the %d shards holds the whole model and computes all of it; one shard uses the machine "
            "better",
            group.size,
        )


def choose_tokens(vocab_size: int, count: int) -> Tensor:
    """Return token ids, int64 [count], from the middle of the vocabulary; special tokens are at its ends."""
    return (vocab_size // 3 + 7 * torch.arange(count)) % vocab_size


def scores_agree(scores: Tensor, expected: Tensor, tolerance: float) -> bool:
    """Return True if no score differs by more than `tolerance` of the greatest. NaN never agrees."""
    bound = tolerance * expected.abs().max().clamp(min=1.0)
    return scores.shape == expected.shape and bool((scores - expected).abs().max() <= bound)
