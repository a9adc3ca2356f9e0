"""How many blocks the cache gets, from the memory that is left and what requests could use; and whether a
model fits at all."""

from dataclasses import dataclass

import torch

from tgis.errors import OperatorError
from tgis.shard.collectives import World
from tgis.shard.memory.kv_cache import KVCache, Shape, bytes_per_block, local_kv_heads

MIB, GIB = 1 << 20, 1 << 30


class ModelTooLargeError(OperatorError):
    """The memory that is left does not hold the model; the text is one line that shows the arithmetic."""


class CacheTooSmallError(OperatorError):
    """A request of full length would not fit; the text is one line that shows the arithmetic."""


@dataclass(frozen=True)
class Demand:
    """What requests could use, and the operator's own bound if there is one."""

    block_size: int
    max_sequence_length: int
    max_batch_size: int
    kv_cache_tokens: int | None
    is_encoder_decoder: bool = False

    @property
    def blocks_per_request(self) -> int:
        """Of full length. Where input and output have blocks of their own and the decoder begins with a token
        that is neither, the worst case is an input that ends with the first token of a block."""
        whole = -(-self.max_sequence_length // self.block_size)
        return whole + 1 if self.is_encoder_decoder else whole

    @property
    def wanted_blocks(self) -> int:
        """As many as requests could use, or as the operator allows."""
        most = self.max_batch_size * self.blocks_per_request
        return most if self.kv_cache_tokens is None else min(most, self.kv_cache_tokens // self.block_size)


@dataclass(frozen=True)
class Room:
    """Bytes, of which all ranks of a machine leave `left` free, and one of them uses `step` for the largest
    step and `contents` for soft prompts and adapters beside its cache."""

    left: int
    step: int
    num_ranks: int
    divisor: int = 4
    contents: int = 0

    @property
    def taken(self) -> int:
        """Beside the caches, by all ranks."""
        return self.num_ranks * (self.step + self.contents)

    @property
    def share(self) -> int:
        """What one rank's cache may take: a quarter of what the rest leaves, or another part of it, over the
        ranks."""
        return max(0, self.left - self.taken) // self.divisor // self.num_ranks


def check_fit(
    shape: Shape,
    world: World,
    dtype: torch.dtype,
    demand: Demand,
    weights: int,
    left: int,
    divisor: int = 4,
    contents: int = 0,
    quantize: str | None = None,
) -> None:
    """Whether weights of so many bytes over this machine's ranks, and beside them on each `contents` and a
    cache, can fit into the bytes that are left before anything is read. Raises ModelTooLargeError or
    CacheTooSmallError."""
    if weights > left:
        raise ModelTooLargeError(
            f"the model does not fit: its weights take {weights / GIB:.2f} GiB as "
            f"{quantize or str(dtype).removeprefix('torch.')}, {left / GIB:.2f} GiB of memory are left"
        )
    room = Room(left - weights, 0, world.local_size, divisor, contents)
    check_room(room)
    block_bytes = bytes_per_block(shape, world, demand.block_size, dtype)
    check_blocks(demand, count_blocks(demand, block_bytes, room.share), block_bytes, room)


def check_room(room: Room) -> None:
    """Raises ModelTooLargeError where the ranks could not compute the largest step, or hold what they may."""
    if room.taken <= room.left:
        return
    step, contents = (room.num_ranks * each / GIB for each in (room.step, room.contents))
    parts = [f"the largest step takes {step:.2f} GiB"] * bool(step)
    cures = ["a smaller --max-step-tokens or --max-batch-size"] * bool(step)
    if contents:
        parts.append(f"soft prompts and adapters may take {contents:.2f} GiB")
        cures.append("a smaller --prompt-cache-size-mb or --adapter-cache-size-mb")
    raise ModelTooLargeError(
        f"the model does not fit: beside its weights {' and '.join(parts)}, "
        f"{room.left / GIB:.2f} GiB of memory are left; {' or '.join(cures)} makes it smaller"
    )


def make_cache(shape: Shape, world: World, dtype: torch.dtype, demand: Demand, room: Room) -> KVCache:
    """Raises CacheTooSmallError."""
    block_bytes = bytes_per_block(shape, world, demand.block_size, dtype)
    num_blocks = count_blocks(demand, block_bytes, room.share)
    check_blocks(demand, num_blocks, block_bytes, room)
    return allocate(shape, world, dtype, demand.block_size, num_blocks)


def allocate(shape: Shape, world: World, dtype: torch.dtype, block_size: int, num_blocks: int) -> KVCache:
    heads = local_kv_heads(shape, world)
    return KVCache(shape.num_layers, num_blocks, block_size, heads, shape.head_dim, dtype, world.device)


def count_blocks(demand: Demand, block_bytes: int, share: int) -> int:
    """What is wanted, or what fits into `share` bytes."""
    return min(demand.wanted_blocks, share // block_bytes)


def check_blocks(demand: Demand, num_blocks: int, block_bytes: int, room: Room) -> None:
    """Raises CacheTooSmallError unless one request of full length fits."""
    if num_blocks >= demand.blocks_per_request:
        return
    needed = demand.blocks_per_request * block_bytes
    bound = f"{room.share / MIB:.0f} MiB ({_explain(room)})"
    if demand.kv_cache_tokens is not None and num_blocks == demand.kv_cache_tokens // demand.block_size:
        bound = f"the {demand.kv_cache_tokens} tokens of --kv-cache-tokens"
    raise CacheTooSmallError(
        f"the cache is too small for one request: --max-sequence-length {demand.max_sequence_length} takes "
        f"{demand.blocks_per_request} blocks of {demand.block_size} tokens and {block_bytes / MIB:.2f} MiB, "
        f"{needed / MIB:.0f} MiB together, but {bound} leave room for {num_blocks}"
    )


def _explain(room: Room) -> str:
    free = f"{room.left / MIB:.0f} MiB"
    if room.step:
        free += f" less {room.num_ranks * room.step / MIB:.0f} MiB for the largest step"
    if room.contents:
        free += f" less {room.num_ranks * room.contents / MIB:.0f} MiB for soft prompts and adapters"
    part = {1: "", 4: "a quarter of "}[room.divisor]
    return f"{part}{free}" + (f", over {room.num_ranks} shards" if room.num_ranks > 1 else "")
