"""Check the schedule of encoder inputs: each is computed whole, in cross blocks that equal inputs share."""

import pytest

from tests.support.router.model_of_shard import integers
from tgis.router.scheduling.block_pool import BlockPool
from tgis.router.scheduling.scheduler import Scheduler
from tgis.router.scheduling.step import Step
from tgis.router.sequence import Sequence, Stopping
from tgis.router.shards.codec import encode_step

START = 7
LIMITS = [(block_size, limit) for block_size in (1, 2, 3, 4) for limit in range(2, 14)]


def sequence(*encoder_ids: int, max_new_tokens: int = 9) -> Sequence:
    return Sequence([START], Stopping(max_new_tokens=max_new_tokens), encoder_token_ids=encoder_ids)


def next_step(scheduler: Scheduler, max_prompt_tokens: int = 100) -> Step:
    step = scheduler.next_step(max_prompt_tokens)
    assert step is not None
    return step


def answer(scheduler: Scheduler, step: Step) -> None:
    """Return an answer in which every sampled token is 5."""
    scheduler.apply_answer(step)
    for work in step.work:
        if work.samples:
            scheduler.append_token(work.sequence, 5)


def opened(step: Step) -> list[int]:
    """Return the numbers of encoder tokens of the sequences that the step opens; 0 for inputs already
    encoded."""
    rows = encode_step(step).opened_rows
    return [0 if row.is_encoded else len(integers(row.encoder_token_ids)) for row in rows]


def test_an_opened_row_carries_its_input_and_its_blocks() -> None:
    scheduler = Scheduler(BlockPool(8, 4), max_sequences=4)
    scheduler.add(sequence(*range(10)))
    [row] = encode_step(next_step(scheduler)).opened_rows
    assert integers(row.encoder_token_ids) == list(range(10))
    assert integers(row.token_ids) == [START]
    assert row.prompt_len == 1
    assert len(integers(row.cross_blocks)) == 3
    assert not row.is_encoded
    assert scheduler.pool.num_used == 4


def test_an_input_above_the_remaining_budget_waits_for_its_own_step() -> None:
    scheduler = Scheduler(BlockPool(100, 4), max_sequences=8)
    for size in (3, 4, 30, 5, 6):
        scheduler.add(sequence(*range(size)))
    sizes = []
    while scheduler.waiting:
        step = next_step(scheduler, 10)
        sizes.append((opened(step), step.num_tokens - step.num_decodes))
        answer(scheduler, step)
    assert sizes == [([3, 4], 9), ([30], 31), ([5], 6), ([6], 7)]


def test_it_waits_neither_for_decoding_rows_nor_for_a_larger_budget() -> None:
    scheduler = Scheduler(BlockPool(100, 4), max_sequences=8)
    scheduler.add(sequence(1, 2))
    answer(scheduler, next_step(scheduler))
    scheduler.add(sequence(*range(50)))
    step = next_step(scheduler, 1)
    assert opened(step) == [50]
    assert (step.num_decodes, step.num_tokens) == (1, 52)


def test_it_waits_for_a_prompt_that_is_being_computed() -> None:
    """Check an encoder input whose sequence continues after the shards were lost."""
    scheduler = Scheduler(BlockPool(100, 4), max_sequences=8)
    resumed = sequence(1, 2)
    resumed.token_ids += [5] * 6
    scheduler.add(resumed)
    scheduler.add(sequence(*range(50)))
    steps = [next_step(scheduler, 5) for _ in range(3)]
    assert [opened(step) for step in steps] == [[2], [], [50]]
    assert [step.num_tokens for step in steps] == [5, 4, 52]


def test_equal_inputs_share_one_output_once_it_is_there() -> None:
    scheduler = Scheduler(BlockPool(20, 4), max_sequences=8)
    inputs = tuple(range(10))  # the last block is not full
    first, second, third = (sequence(*inputs) for _ in range(3))
    scheduler.add(first)
    encoding = next_step(scheduler)
    scheduler.add(second)
    assert opened(next_step(scheduler)) == [10]
    answer(scheduler, encoding)
    scheduler.add(third)
    shared = next_step(scheduler)
    assert opened(shared) == [0]
    assert third.cross_blocks == first.cross_blocks
    assert shared.num_tokens == len(shared.work)
    assert not set(first.cross_blocks) & set(second.cross_blocks)
    assert scheduler.num_cache_hits == 10


def test_other_inputs_of_the_same_beginning_share_nothing() -> None:
    scheduler = Scheduler(BlockPool(40, 4), max_sequences=8)
    scheduler.add(sequence(*range(8)))
    answer(scheduler, next_step(scheduler))
    for size in (4, 7, 9, 12):
        scheduler.add(sequence(*range(size)))
    assert opened(next_step(scheduler)) == [4, 7, 9, 12]


def test_an_output_that_is_gone_in_part_is_computed_again() -> None:
    pool = BlockPool(10, 4)
    scheduler = Scheduler(pool, max_sequences=8)
    first = sequence(*range(12))
    scheduler.add(first)
    answer(scheduler, next_step(scheduler))
    scheduler.finish(first)
    others = pool.allocate([], 8)  # the unused blocks, the decoder's block and the encoder's last block
    assert others is not None
    pool.release(others)
    scheduler.add(sequence(*range(12)))
    again = next_step(scheduler)
    assert opened(again) == [12]
    answer(scheduler, again)
    scheduler.add(sequence(*range(12)))
    assert opened(next_step(scheduler)) == [0]


def test_decoders_share_their_prefixes_below_equal_inputs_only() -> None:
    scheduler = Scheduler(BlockPool(40, 2), max_sequences=8)
    first = sequence(1, 2, 3)
    scheduler.add(first)
    for _ in range(5):
        answer(scheduler, next_step(scheduler))
    starts = []
    for inputs in ((1, 2, 3), (1, 2, 4)):
        resumed = sequence(*inputs)
        resumed.token_ids += [5] * 5
        scheduler.add(resumed)
        step = next_step(scheduler)
        starts.append(step.work[-1].start)
        answer(scheduler, step)
    assert starts == [4, 0]


def test_cross_blocks_come_back_only_after_the_last_step_that_reads_them() -> None:
    scheduler = Scheduler(BlockPool(4, 4), max_sequences=4)
    first = sequence(1, 2, 3, 4, 5)
    scheduler.add(first)
    encoding, decoding = next_step(scheduler), next_step(scheduler)
    answer(scheduler, encoding)
    scheduler.finish(first)
    assert scheduler.pool.num_used == 3
    scheduler.apply_answer(decoding)
    assert scheduler.pool.num_used == 0


def test_a_sequence_gets_all_of_its_blocks_or_none() -> None:
    pool = BlockPool(4, 4)
    scheduler = Scheduler(pool, max_sequences=4)
    scheduler.add(sequence(1))
    first = next_step(scheduler)
    scheduler.add(sequence(*range(5)))
    assert opened(next_step(scheduler)) == []  # two of three blocks are free
    assert pool.num_used == 2
    assert scheduler.num_deferred == 1
    answer(scheduler, first)
    scheduler.finish(first.work[0].sequence)


def test_a_preempted_sequence_gives_its_cross_blocks_to_the_older_and_comes_back_encoded_or_not() -> None:
    pool = BlockPool(5, 2)
    scheduler = Scheduler(pool, max_sequences=4)
    old, young = sequence(1, 2), sequence(3, 4)
    scheduler.add(old)
    scheduler.add(young)
    for _ in range(3):  # the third token of each needs a second block, and only one is left
        step = next_step(scheduler)
        answer(scheduler, step)
    assert scheduler.num_preemptions == 1
    assert list(scheduler.waiting) == [young]
    assert young.cross_blocks == young.block_table == []
    scheduler.finish(old)
    assert opened(next_step(scheduler)) == [0]  # the block of its encoder has not been reused
    assert len(young.cross_blocks) == 1
    assert young.token_ids == [START, 5, 5]


@pytest.mark.parametrize(("block_size", "limit"), LIMITS)
def test_the_least_cache_that_is_accepted_holds_any_request(block_size: int, limit: int) -> None:
    num_blocks = 1 + -(-(limit - 1) // block_size)
    for num_inputs in range(1, limit):
        scheduler = Scheduler(BlockPool(num_blocks, block_size), max_sequences=4)
        whole = sequence(*range(num_inputs), max_new_tokens=limit - num_inputs)
        scheduler.add(whole)
        while not whole.reached_limit:
            answer(scheduler, next_step(scheduler))
        assert scheduler.num_preemptions == 0
