"""Plans memory: checks that the model fits, and computes the number of KV cache blocks."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from tgis.errors import OperatorError
from tgis.shard.collectives import ProcessGroup
from tgis.shard.memory.kv_cache import (
    AttentionShape,
    CacheScale,
    KVCache,
    bytes_per_block,
    local_kv_heads,
)

MIB, GIB = 1 << 20, 1 << 30


class ModelTooLargeError(OperatorError):
    """Error: the model does not fit into the memory that is left."""


class CacheTooSmallError(OperatorError):
    """Error: a request of full length does not fit into the KV cache."""


@dataclass(frozen=True)
class Demand:
    """Cache space that requests could use, and the operator's limit if there is one."""

    block_size: int
    max_sequence_length: int
    max_batch_size: int
    kv_cache_tokens: int | None
    is_encoder_decoder: bool = False

    @property
    def blocks_per_request(self) -> int:
        """Number of blocks of a request of full length."""
        whole = -(-self.max_sequence_length // self.block_size)
        # In an encoder-decoder model, input and output have separate blocks, and the decoder begins with a
        # token that belongs to neither. An input may end with the first token of a block.
        return whole + 1 if self.is_encoder_decoder else whole

    @property
    def wanted_blocks(self) -> int:
        """Number of blocks that requests could use, or that the operator allows if that is less."""
        most = self.max_batch_size * self.blocks_per_request
        return most if self.kv_cache_tokens is None else min(most, self.kv_cache_tokens // self.block_size)


@dataclass(frozen=True)
class MemoryBudget:
    """Memory of a machine in bytes."""

    left: int  # for all ranks of the machine
    step: int  # that a rank takes for the largest step
    num_ranks: int
    cache_fraction: float = 0.25  # share of what steps and adapters leave that caches may take
    adapter_bytes: int = 0  # that a rank takes for soft prompts and adapters
    graphs: int = 0  # that a rank takes for CUDA graphs
    margin: int = 0  # that a rank leaves free

    @property
    def taken(self) -> int:
        """Bytes that all ranks take beside their caches."""
        return self.num_ranks * (self.step + self.adapter_bytes + self.graphs + self.margin)

    @property
    def share(self) -> int:
        """Bytes that one rank's cache may take."""
        return int(max(0, self.left - self.taken) * self.cache_fraction) // self.num_ranks


def check_fit(
    shape: AttentionShape,
    group: ProcessGroup,
    dtype: torch.dtype,
    demand: Demand,
    weights: int,
    budget: MemoryBudget,
    kept_type: str | None = None,
) -> None:
    """Check that the model fits into the budget of this machine, which has no steps yet.

    `weights` is the size of the weights of all ranks of this machine, of type `kept_type` if it is not the
    cache's type, `dtype`. Raises ModelTooLargeError or CacheTooSmallError."""
    if weights > budget.left:
        type_name = kept_type or str(dtype).removeprefix("torch.")
        raise ModelTooLargeError(
            f"the model does not fit: its weights take {weights / GIB:.2f} GiB as {type_name}, "
            f"{budget.left / GIB:.2f} GiB of memory are left"
        )
    budget = replace(budget, left=budget.left - weights)
    check_budget(budget)
    block_bytes = bytes_per_block(shape, group, demand.block_size, dtype)
    check_blocks(demand, count_blocks(demand, block_bytes, budget.share), block_bytes, budget)


def check_budget(budget: MemoryBudget) -> None:
    """Raise ModelTooLargeError if what a rank takes beside its cache does not fit into memory."""
    if budget.taken <= budget.left:
        return
    parts, cures = [], []
    for num_bytes, part, cure in (
        (budget.step, "the largest step takes", "a smaller --max-step-tokens or --max-batch-size"),
        (
            budget.adapter_bytes,
            "soft prompts and adapters may take",
            "a smaller --prompt-cache-size-mb or --adapter-cache-size-mb",
        ),
        (budget.graphs, "CUDA graphs take", "fewer --cuda-graphs"),
    ):
        if num_bytes:
            parts.append(f"{part} {budget.num_ranks * num_bytes / GIB:.2f} GiB")
            cures.append(cure)
    if budget.margin:
        parts.append(f"{budget.num_ranks * budget.margin / GIB:.2f} GiB stay free")
    raise ModelTooLargeError(
        f"the model does not fit: beside its weights {' and '.join(parts)}, "
        f"{budget.left / GIB:.2f} GiB of memory are left; {' or '.join(cures)} makes it smaller"
    )


def plan_blocks(demand: Demand, block_bytes: int, budget: MemoryBudget) -> int:
    """Return the number of blocks that fit into `budget`. Raises CacheTooSmallError."""
    num_blocks = count_blocks(demand, block_bytes, budget.share)
    check_blocks(demand, num_blocks, block_bytes, budget)
    return num_blocks


def allocate(
    shape: AttentionShape,
    group: ProcessGroup,
    dtype: torch.dtype,
    block_size: int,
    num_blocks: int,
    scales: Sequence[CacheScale] = (),
) -> KVCache:
    sizes = (shape.num_layers, num_blocks, block_size, local_kv_heads(shape, group), shape.head_dim)
    return KVCache(*sizes, dtype, group.device, scales)


def count_blocks(demand: Demand, block_bytes: int, share: int) -> int:
    return min(demand.wanted_blocks, share // block_bytes)


def check_blocks(demand: Demand, num_blocks: int, block_bytes: int, budget: MemoryBudget) -> None:
    """Raise CacheTooSmallError unless one request of full length fits."""
    if num_blocks >= demand.blocks_per_request:
        return
    needed = demand.blocks_per_request * block_bytes
    bound = f"{budget.share / MIB:.0f} MiB ({_explain_budget(budget)})"
    if demand.kv_cache_tokens is not None and num_blocks == demand.kv_cache_tokens // demand.block_size:
        bound = f"the {demand.kv_cache_tokens} tokens of --kv-cache-tokens"
    raise CacheTooSmallError(
        f"the cache is too small for one request: --max-sequence-length {demand.max_sequence_length} takes "
        f"{demand.blocks_per_request} blocks of {demand.block_size} tokens and {block_bytes / MIB:.2f} MiB, "
        f"{needed / MIB:.0f} MiB together, but {bound} leave room for {num_blocks}"
    )


def extrapolate_graphs(first: int, second: int, num_graphs: int) -> int:
    """Return the bytes of all graphs. The `first` one, the largest, took memory that all share; the `second`
    one, of another size, took only its own, as the others will."""
    return max(0, first) + max(0, second) * (num_graphs - 1) if num_graphs else 0


def find_lack(budget: MemoryBudget, left: int) -> int:
    """Return the bytes that are missing on a rank, beside its cache and graphs, or less than zero. Half of
    the margin may be gone. `left` is for all ranks of the machine."""
    return budget.step + budget.adapter_bytes + budget.margin // 2 - left // budget.num_ranks


def _explain_budget(budget: MemoryBudget) -> str:
    free = f"{budget.left / MIB:.0f} MiB"
    if budget.step:
        free += f" less {budget.num_ranks * budget.step / MIB:.0f} MiB for the largest step"
    if budget.adapter_bytes:
        free += f" less {budget.num_ranks * budget.adapter_bytes / MIB:.0f} MiB for soft prompts and adapters"
    if budget.graphs:
        free += f" less {budget.num_ranks * budget.graphs / MIB:.0f} MiB for CUDA graphs"
    if budget.margin:
        free += f" less {budget.num_ranks * budget.margin / MIB:.0f} MiB that stay free"
    part = {1: "", 0.25: "a quarter of "}.get(budget.cache_fraction, f"{budget.cache_fraction:g} of ")
    return f"{part}{free}" + (f", over {budget.num_ranks} shards" if budget.num_ranks > 1 else "")
