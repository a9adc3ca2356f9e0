"""Check the size of the cache, and the arithmetic in a refusal."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from tgis.shard.collectives import ProcessGroup
from tgis.shard.memory.kv_cache import bytes_per_block
from tgis.shard.models.spec import DecoderSpec
from tgis.shard.startup.memory.memory_plan import (
    GIB,
    MIB,
    CacheTooSmallError,
    Demand,
    MemoryBudget,
    ModelTooLargeError,
    check_blocks,
    check_budget,
    check_fit,
    count_blocks,
    count_states,
    plan_blocks,
)

SPEC = DecoderSpec(
    num_layers=2,
    hidden_size=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=48,
    vocab_size=99,
    norm_eps=1e-5,
)
BLOCK_BYTES = 2 * 2 * 2 * 16 * 8 * 4  # keys and values, layers, heads, tokens, head_dim, float32


def test_blocks_are_the_least_of_three_bounds() -> None:
    assert count_blocks(Demand(16, 100, 4, None), block_bytes=10, share=10**6) == 4 * 7
    assert count_blocks(Demand(16, 100, 4, None), block_bytes=10, share=99) == 9
    assert count_blocks(Demand(16, 100, 4, 95), block_bytes=10, share=10**6) == 5


@pytest.mark.parametrize("block_size", [1, 2, 3, 8, 16])
def test_blocks_of_the_worst_request(block_size: int) -> None:
    """Try every division of a sequence's tokens into input and output."""
    for length in range(2, 70):
        whole = -(-length // block_size)
        assert Demand(block_size, length, 1, None).blocks_per_request == whole
        worst = max(
            -(-encoded // block_size) + -(-(length - encoded + 1) // block_size)
            for encoded in range(1, length)
        )
        assert Demand(block_size, length, 1, None, is_encoder_decoder=True).blocks_per_request == worst


def test_a_rank_gets_its_part_of_a_quarter() -> None:
    assert MemoryBudget(left=1000, step=0, num_ranks=1).share == 250
    assert MemoryBudget(left=1000, step=100, num_ranks=2).share == 100
    assert MemoryBudget(left=1000, step=600, num_ranks=2).share == 0
    assert MemoryBudget(left=1000, step=100, num_ranks=2, adapter_bytes=200).share == 50


def test_a_rank_gets_its_part_of_the_share_that_is_asked_for() -> None:
    assert MemoryBudget(left=1000, step=100, num_ranks=2, cache_fraction=0.6).share == 240
    budget = MemoryBudget(30 * MIB, 3 * MIB, 2, cache_fraction=0.6)
    with pytest.raises(CacheTooSmallError, match=r"but 7 MiB \(0\.6 of 30 MiB less 6 MiB for the largest"):
        check_blocks(Demand(16, 300, 4, None), 14, MIB // 2, budget)


def test_one_request_must_fit() -> None:
    demand = Demand(16, 100, 4, None)
    check_blocks(demand, 7, MIB, MemoryBudget(28 * MIB, 0, 1))
    with pytest.raises(CacheTooSmallError) as error:
        check_blocks(demand, 6, MIB // 2, MemoryBudget(30 * MIB, 3 * MIB, 2))
    assert str(error.value) == (
        "the cache is too small for one request: --max-sequence-length 100 takes 7 blocks of 16 tokens and "
        "0.50 MiB, 4 MiB together, but 3 MiB (a quarter of 30 MiB less 6 MiB for the largest step, over 2 "
        "shards) leave room for 6"
    )


def test_soft_prompts_and_adapters_are_part_of_the_arithmetic() -> None:
    with pytest.raises(CacheTooSmallError) as error:
        check_blocks(
            Demand(16, 100, 4, None), 6, MIB // 2, MemoryBudget(30 * MIB, 3 * MIB, 2, adapter_bytes=4 * MIB)
        )
    assert "(a quarter of 30 MiB less 6 MiB for the largest step less 8 MiB for soft prompts and ad" in str(
        error.value
    )
    check_budget(MemoryBudget(2 * GIB, GIB // 2, 2, adapter_bytes=GIB // 2))
    with pytest.raises(ModelTooLargeError) as refused:
        check_budget(MemoryBudget(2 * GIB - 1, GIB // 2, 2, adapter_bytes=GIB // 2))
    assert str(refused.value) == (
        "the model does not fit: in addition to its weights the largest step takes 1.00 GiB and soft prompts "
        "and adapters may take 1.00 GiB, but only 2.00 GiB of memory are free; reduce --max-step-tokens or "
        "--max-batch-size or --prompt-cache-size-mb or --adapter-cache-size-mb"
    )


def test_the_cache_is_what_the_room_allows() -> None:
    group, demand = ProcessGroup(0, 1), Demand(16, 100, 4, None)
    assert bytes_per_block(SPEC, group, 16, torch.float32) == BLOCK_BYTES
    for blocks, step in product((7, 9, 50), (0, 3 * MIB)):
        budget = MemoryBudget(4 * blocks * BLOCK_BYTES + step, step, 1)
        assert plan_blocks(demand, BLOCK_BYTES, budget) == min(blocks, 28)
    with pytest.raises(CacheTooSmallError):
        plan_blocks(demand, BLOCK_BYTES, MemoryBudget(4 * 7 * BLOCK_BYTES - 1, 0, 1))


def test_a_model_that_cannot_fit_is_refused_before_it_is_read() -> None:
    demand = Demand(16, 100, 4, None)
    needed = 4 * 7 * BLOCK_BYTES

    def check(left: int, adapter_bytes: int = 0, block_bytes: int = BLOCK_BYTES) -> None:
        budget = MemoryBudget(left, 0, 1, adapter_bytes=adapter_bytes)
        check_fit(demand, block_bytes, budget, 3 * GIB, "bfloat16")

    check(3 * GIB + needed)
    with pytest.raises(ModelTooLargeError) as error:
        check(2 * GIB)
    assert str(error.value) == (
        "the model does not fit: its weights take 3.00 GiB as bfloat16, but only 2.00 GiB of memory are free"
    )
    with pytest.raises(CacheTooSmallError, match=r"leave room for 6$"):
        check(3 * GIB + needed - 1)
    check(4 * GIB + needed, adapter_bytes=GIB)
    with pytest.raises(CacheTooSmallError, match=r"leave room for 6$"):
        check(4 * GIB + needed - 1, adapter_bytes=GIB)
    check(3 * GIB + 2 * needed, block_bytes=2 * BLOCK_BYTES)
    with pytest.raises(CacheTooSmallError, match=r"leave room for 6$"):
        check(3 * GIB + 2 * needed - 1, block_bytes=2 * BLOCK_BYTES)
    with pytest.raises(
        ModelTooLargeError, match=r"weights soft prompts and adapters may take 1\.00 GiB, but only 0"
    ):
        check(7 * GIB // 2, adapter_bytes=GIB)


def test_the_largest_step_must_fit() -> None:
    check_budget(MemoryBudget(2 * GIB, GIB, 2))
    with pytest.raises(ModelTooLargeError) as error:
        check_budget(MemoryBudget(2 * GIB - 1, GIB, 2))
    assert str(error.value) == (
        "the model does not fit: in addition to its weights the largest step takes 2.00 GiB, but only "
        "2.00 GiB of memory are free; reduce --max-step-tokens or --max-batch-size"
    )


def test_states_take_half_of_the_cache_or_what_the_blocks_leave() -> None:
    demand = Demand(16, 100, 4, None, state_bytes=5)
    assert [count_states(demand, 10, share) for share in (9, 10, 60, 10**6)] == [0, 1, 6, 8]
    assert [count_blocks(demand, 10, share) for share in (60, 100, 400)] == [3, 6, 28]
    few_blocks = replace(demand, kv_cache_tokens=32)
    assert count_states(few_blocks, 10, 50) == 6
    assert count_blocks(few_blocks, 10, 50) == 2
    assert count_states(Demand(16, 100, 4, None), 10, 10**6) == 0


def test_states_for_drafts_are_taken_first() -> None:
    demand = Demand(16, 100, 4, None, state_bytes=5, num_spare_states=3)
    assert [count_states(demand, 10, share) for share in (30, 39, 40, 10**6)] == [0, 0, 1, 8]
    assert [count_blocks(demand, 10, share) for share in (40, 100, 400)] == [2, 5, 28]
    large = Demand(16, 100, 4, None, state_bytes=4 * MIB, num_spare_states=3)
    check_blocks(large, 7, MIB, MemoryBudget(128 * MIB, 0, 1))
    with pytest.raises(CacheTooSmallError, match=r"for states, of which the speculator needs 12\.00 MiB"):
        check_blocks(large, 7, MIB, MemoryBudget(124 * MIB, 0, 1))


def test_a_cache_without_room_for_a_state_is_refused() -> None:
    demand = Demand(16, 100, 4, None, state_bytes=4 * MIB)
    check_blocks(demand, 7, MIB, MemoryBudget(32 * MIB, 0, 1))
    with pytest.raises(
        CacheTooSmallError, match=r"takes 4\.00 MiB, .* half of 8 MiB \(a quarter of 31 MiB\)"
    ):
        check_blocks(demand, 7, MIB, MemoryBudget(31 * MIB, 0, 1))
