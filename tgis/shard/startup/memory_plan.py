"""Plans memory: checks that the model fits, and computes the number of KV cache blocks."""

from dataclasses import dataclass

import torch

from tgis.errors import OperatorError
from tgis.shard.collectives import ProcessGroup
from tgis.shard.memory.kv_cache import AttentionShape, KVCache, bytes_per_block, local_kv_heads

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
    divisor: int = 4  # caches may take one part in so many of what steps and adapters leave
    adapter_bytes: int = 0  # that a rank takes for soft prompts and adapters

    @property
    def taken(self) -> int:
        """Bytes that all ranks take beside their caches."""
        return self.num_ranks * (self.step + self.adapter_bytes)

    @property
    def share(self) -> int:
        """Bytes that one rank's cache may take."""
        return max(0, self.left - self.taken) // self.divisor // self.num_ranks


def check_fit(
    shape: AttentionShape,
    group: ProcessGroup,
    dtype: torch.dtype,
    demand: Demand,
    weights: int,
    left: int,
    divisor: int = 4,
    adapter_bytes: int = 0,
    kept_type: str | None = None,
) -> None:
    """Check that the model fits into the `left` bytes of this machine.

    `weights` is the size of the weights of all ranks of this machine, of type `kept_type`. Raises
    ModelTooLargeError or CacheTooSmallError."""
    if weights > left:
        raise ModelTooLargeError(
            f"the model does not fit: its weights take {weights / GIB:.2f} GiB as "
            f"{kept_type or str(dtype).removeprefix('torch.')}, {left / GIB:.2f} GiB of memory are left"
        )
    budget = MemoryBudget(left - weights, 0, group.local_size, divisor, adapter_bytes)
    check_budget(budget)
    block_bytes = bytes_per_block(shape, group, demand.block_size, dtype)
    check_blocks(demand, count_blocks(demand, block_bytes, budget.share), block_bytes, budget)


def check_budget(budget: MemoryBudget) -> None:
    """Raise ModelTooLargeError if the largest step, soft prompts and adapters do not fit into memory."""
    if budget.taken <= budget.left:
        return
    step_gib, adapters_gib = (budget.num_ranks * each / GIB for each in (budget.step, budget.adapter_bytes))
    parts = [f"the largest step takes {step_gib:.2f} GiB"] * bool(step_gib)
    cures = ["a smaller --max-step-tokens or --max-batch-size"] * bool(step_gib)
    if adapters_gib:
        parts.append(f"soft prompts and adapters may take {adapters_gib:.2f} GiB")
        cures.append("a smaller --prompt-cache-size-mb or --adapter-cache-size-mb")
    raise ModelTooLargeError(
        f"the model does not fit: beside its weights {' and '.join(parts)}, "
        f"{budget.left / GIB:.2f} GiB of memory are left; {' or '.join(cures)} makes it smaller"
    )


def make_cache(
    shape: AttentionShape, group: ProcessGroup, dtype: torch.dtype, demand: Demand, budget: MemoryBudget
) -> KVCache:
    """Allocate a cache that fits into `budget`. Raises CacheTooSmallError."""
    block_bytes = bytes_per_block(shape, group, demand.block_size, dtype)
    num_blocks = count_blocks(demand, block_bytes, budget.share)
    check_blocks(demand, num_blocks, block_bytes, budget)
    return allocate(shape, group, dtype, demand.block_size, num_blocks)


def allocate(
    shape: AttentionShape, group: ProcessGroup, dtype: torch.dtype, block_size: int, num_blocks: int
) -> KVCache:
    heads = local_kv_heads(shape, group)
    return KVCache(shape.num_layers, num_blocks, block_size, heads, shape.head_dim, dtype, group.device)


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


def _explain_budget(budget: MemoryBudget) -> str:
    free = f"{budget.left / MIB:.0f} MiB"
    if budget.step:
        free += f" less {budget.num_ranks * budget.step / MIB:.0f} MiB for the largest step"
    if budget.adapter_bytes:
        free += f" less {budget.num_ranks * budget.adapter_bytes / MIB:.0f} MiB for soft prompts and adapters"
    part = {1: "", 4: "a quarter of "}[budget.divisor]
    return f"{part}{free}" + (f", over {budget.num_ranks} shards" if budget.num_ranks > 1 else "")
