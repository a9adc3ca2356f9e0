"""Plans memory: checks that the model fits, and computes the number of KV cache blocks."""

from dataclasses import dataclass, replace

from tgis.errors import OperatorError

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30


class ModelTooLargeError(OperatorError):
    """Error when the model does not fit into the free memory."""


class CacheTooSmallError(OperatorError):
    """Error when a request of maximum length does not fit into the KV cache."""


@dataclass(frozen=True)
class Demand:
    """Cache space that requests could use, and the operator's limit, if any."""

    block_size: int
    max_sequence_length: int
    max_batch_size: int
    kv_cache_tokens: int | None
    is_encoder_decoder: bool = False
    state_bytes: int = 0  # of one sequence's state on one rank; 0: the model keeps none
    num_spare_states: int = 0  # for states after drafts, in addition to those of sequences

    @property
    def blocks_per_request(self) -> int:
        """Number of blocks for a request of maximum length."""
        whole = -(-self.max_sequence_length // self.block_size)
        # In an encoder-decoder model, input and output have separate blocks, and the decoder starts with a
        # token that belongs to neither. So the total can be one block more.
        return whole + 1 if self.is_encoder_decoder else whole

    @property
    def wanted_blocks(self) -> int:
        """Number of blocks that requests could use, within the operator's limit."""
        maximum = self.max_batch_size * self.blocks_per_request
        if self.kv_cache_tokens is None:
            return maximum
        return min(maximum, self.kv_cache_tokens // self.block_size)

    @property
    def wanted_states(self) -> int:
        """Number of states of the largest batch, and as many snapshots."""
        return 2 * self.max_batch_size if self.state_bytes else 0


@dataclass(frozen=True)
class MemoryBudget:
    """Memory of a machine in bytes."""

    left: int  # for all ranks of the machine
    step: int  # per rank, for the largest step
    num_ranks: int
    cache_fraction: float = 0.25  # fraction of the remaining memory that caches may use
    adapter_bytes: int = 0  # per rank, for soft prompts and adapters
    graphs: int = 0  # per rank, for CUDA graphs
    margin: int = 0  # per rank, left free

    @property
    def taken(self) -> int:
        """Bytes that all ranks use in addition to their caches."""
        return self.num_ranks * (self.step + self.adapter_bytes + self.graphs + self.margin)

    @property
    def share(self) -> int:
        """Maximum bytes of one rank's cache."""
        return int(max(0, self.left - self.taken) * self.cache_fraction) // self.num_ranks


def check_fit(demand: Demand, block_bytes: int, budget: MemoryBudget, weights: int, type_name: str) -> None:
    """Check that the model fits into this machine's budget, which does not include steps yet. `weights` is
    the total size of the weights of this machine's ranks, and `type_name` their type.

    Raises ModelTooLargeError or CacheTooSmallError."""
    if weights > budget.left:
        raise ModelTooLargeError(
            f"the model does not fit: its weights take {weights / GIB:.2f} GiB as {type_name}, but only "
            f"{budget.left / GIB:.2f} GiB of memory are free"
        )
    budget = replace(budget, left=budget.left - weights)
    check_budget(budget)
    check_blocks(demand, count_blocks(demand, block_bytes, budget.share), block_bytes, budget)


def check_budget(budget: MemoryBudget) -> None:
    """Raise ModelTooLargeError if the memory that ranks use in addition to their caches is not available."""
    if budget.taken <= budget.left:
        return
    parts = []
    options = []
    for num_bytes, part, option in (
        (budget.step, "the largest step takes", "--max-step-tokens or --max-batch-size"),
        (
            budget.adapter_bytes,
            "soft prompts and adapters may take",
            "--prompt-cache-size-mb or --adapter-cache-size-mb",
        ),
        (budget.graphs, "CUDA graphs take", "--cuda-graphs"),
    ):
        if num_bytes:
            parts.append(f"{part} {budget.num_ranks * num_bytes / GIB:.2f} GiB")
            options.append(option)
    if budget.margin:
        parts.append(f"{budget.num_ranks * budget.margin / GIB:.2f} GiB stay free")
    raise ModelTooLargeError(
        f"the model does not fit: in addition to its weights {' and '.join(parts)}, but only "
        f"{budget.left / GIB:.2f} GiB of memory are free; reduce {' or '.join(options)}"
    )


def plan_blocks(demand: Demand, block_bytes: int, budget: MemoryBudget) -> int:
    """Return the number of blocks that fit into `budget`. Raises CacheTooSmallError."""
    num_blocks = count_blocks(demand, block_bytes, budget.share)
    check_blocks(demand, num_blocks, block_bytes, budget)
    return num_blocks


def count_blocks(demand: Demand, block_bytes: int, share: int) -> int:
    share -= (count_states(demand, block_bytes, share) + demand.num_spare_states) * demand.state_bytes
    # Blocks of models without attention take no memory.
    return min(demand.wanted_blocks, share // block_bytes) if block_bytes else demand.wanted_blocks


def count_states(demand: Demand, block_bytes: int, share: int) -> int:
    """Return the number of states of sequences that fit, beside the spare ones, into the half of a cache, or
    into what its blocks leave."""
    if not demand.wanted_states:
        return 0
    room = max(share // 2, share - demand.wanted_blocks * block_bytes)
    return min(demand.wanted_states, max(room // demand.state_bytes - demand.num_spare_states, 0))


def check_blocks(demand: Demand, num_blocks: int, block_bytes: int, budget: MemoryBudget) -> None:
    """Raise CacheTooSmallError unless one request of maximum length fits."""
    if demand.state_bytes and not count_states(demand, block_bytes, budget.share):
        drafts = ""
        if demand.num_spare_states:
            needed = demand.num_spare_states * demand.state_bytes
            drafts = f", of which the speculator needs {needed / MIB:.2f} MiB"
        raise CacheTooSmallError(
            f"the state of one request takes {demand.state_bytes / MIB:.2f} MiB, but the cache has only half "
            f"of {budget.share / MIB:.0f} MiB ({_explain_budget(budget)}) for states{drafts}"
        )
    if num_blocks >= demand.blocks_per_request:
        return
    needed = demand.blocks_per_request * block_bytes
    limit = f"{budget.share / MIB:.0f} MiB ({_explain_budget(budget)})"
    if demand.kv_cache_tokens is not None and num_blocks == demand.kv_cache_tokens // demand.block_size:
        limit = f"the {demand.kv_cache_tokens} tokens of --kv-cache-tokens"
    raise CacheTooSmallError(
        f"the cache is too small for one request: --max-sequence-length {demand.max_sequence_length} takes "
        f"{demand.blocks_per_request} blocks of {demand.block_size} tokens and {block_bytes / MIB:.2f} MiB, "
        f"{needed / MIB:.0f} MiB together, but {limit} leave room for {num_blocks}"
    )


def extrapolate_graphs(first: int, second: int, num_graphs: int) -> int:
    """Estimate the bytes of all graphs. The `first` graph is the largest: its memory is shared by all. The
    `second` graph, like each further one, needs only its own memory in addition."""
    return max(0, first) + max(0, second) * (num_graphs - 1) if num_graphs else 0


def count_missing(budget: MemoryBudget, left: int) -> int:
    """Return the bytes that a rank lacks for steps and adapters, after its cache and graphs are allocated;
    zero or less if none are missing. Half of the margin may be used. `left` is for all ranks of the
    machine."""
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
