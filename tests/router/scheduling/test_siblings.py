"""Check sequences of one prompt: one computes it and the others hit the cache, but never across salts."""

import random
from collections import deque

import pytest

from tests.support.router.model_of_shard import ModelOfShard, truth
from tgis.pb import shard_pb2 as pb
from tgis.router.scheduling.block_pool import BlockPool
from tgis.router.scheduling.scheduler import Scheduler
from tgis.router.scheduling.step import Step
from tgis.router.sequence import CacheSalt, Details, Sequence, Siblings, Stopping
from tgis.router.shards.codec import decode_answer, encode_step

PROMPT = list(range(1, 11))
ENCODER_INPUT = (5, 6, 7, 8, 9)
BLOCK_SIZE = 4
NUM_SHARED = 8
"""The number of prompt tokens in full blocks."""
VOCAB_SIZE = 50


def family(count: int, num_new: int = 4, encoder_ids: tuple[int, ...] = ()) -> list[Sequence]:
    siblings = Siblings()
    prompt = [1] if encoder_ids else PROMPT
    return [
        Sequence(list(prompt), Stopping(num_new), encoder_token_ids=encoder_ids, siblings=siblings)
        for _ in range(count)
    ]


def scheduler_of(*sequences: Sequence, num_blocks: int = 100, max_sequences: int = 8) -> Scheduler:
    scheduler = Scheduler(BlockPool(num_blocks, BLOCK_SIZE), max_sequences)
    for sequence in sequences:
        scheduler.add(sequence)
    return scheduler


def next_step(scheduler: Scheduler, max_prompt_tokens: int = 100) -> Step:
    step = scheduler.next_step(max_prompt_tokens)
    assert step is not None
    return step


def spans(step: Step) -> list[tuple[Sequence, int, int]]:
    return [(work.sequence, work.start, work.end) for work in step.work]


def answer(scheduler: Scheduler, step: Step) -> None:
    """Return an answer in which every sampled token is 5."""
    scheduler.apply_answer(step)
    for work in step.work:
        if work.samples:
            scheduler.append_token(work.sequence, 5)


def test_siblings_wait_for_the_prompt_and_delay_no_other() -> None:
    leader, second, third = family(3)
    other, late = Sequence([30, 31], Stopping(4)), Sequence([40], Stopping(4))
    scheduler = scheduler_of(leader, second, third, other)
    first = next_step(scheduler, 9)
    assert spans(first) == [(leader, 0, 9)]
    rest = next_step(scheduler)
    assert spans(rest) == [(leader, 9, 10), (other, 0, 2)]
    scheduler.add(late)
    for step in (first, rest):
        answer(scheduler, step)
    opened = [span for span in spans(next_step(scheduler)) if span[0].num_generated == 0]
    assert opened == [(second, NUM_SHARED, 10), (third, NUM_SHARED, 10), (late, 0, 1)]
    assert second.block_table[:2] == third.block_table[:2] == leader.block_table[:2]
    assert len({sequence.block_table[2] for sequence in (leader, second, third)}) == 3


def test_the_next_sibling_takes_the_place_of_one_that_ends_before_its_prompt_is_computed() -> None:
    """Return whether the sequence waits, is computed in part or is in flight, and its position in the
    queue."""
    *ended, last = family(4)
    other = Sequence([30, 31], Stopping(4))
    scheduler = scheduler_of(*ended, last)
    scheduler.finish(ended[0])
    step = next_step(scheduler, 5)
    assert spans(step) == [(ended[1], 0, 5)]
    answer(scheduler, step)
    on_its_way = next_step(scheduler, 5)
    scheduler.add(other)
    scheduler.finish(ended[1])
    taking_over = next_step(scheduler, 5)
    assert spans(taking_over) == [(ended[2], 4, 9)]  # answered blocks hit the cache
    scheduler.finish(ended[2])
    assert spans(next_step(scheduler, 100)) == [(last, 4, 10), (other, 0, 2)]
    answer(scheduler, on_its_way)


def test_a_sibling_that_ends_while_it_waits_leaves_the_others_alone() -> None:
    leader, second, third = family(3)
    scheduler = scheduler_of(leader, second, third)
    step = next_step(scheduler)
    scheduler.finish(second)
    answer(scheduler, step)
    assert spans(next_step(scheduler))[1:] == [(third, NUM_SHARED, 10)]


def test_siblings_of_one_that_has_ended_start_together() -> None:
    leader, *others = family(4, num_new=1)
    scheduler = scheduler_of(leader, *others)
    answer(scheduler, next_step(scheduler))
    scheduler.finish(leader)
    assert spans(next_step(scheduler)) == [(other, NUM_SHARED, 10) for other in others]


def test_after_a_loss_one_computes_the_prompt_again() -> None:
    leader, second, third = family(3)
    scheduler = scheduler_of(leader, second, third)
    for _ in range(2):
        answer(scheduler, next_step(scheduler))
    assert list(scheduler.running) == [leader, second, third]
    scheduler.reset(scheduler.pool.renew(100, BLOCK_SIZE))
    step = next_step(scheduler)
    assert spans(step) == [(leader, 0, 12)]
    answer(scheduler, step)
    assert spans(next_step(scheduler)) == [(leader, 12, 13), (second, 8, 11), (third, 8, 11)]


def test_suspects_are_tried_whatever_their_siblings_do() -> None:
    leader, second, third = family(3)
    scheduler = scheduler_of(leader, second, third, max_sequences=2)
    answer(scheduler, next_step(scheduler))
    assert [sequence for sequence, *_ in spans(next_step(scheduler))] == [leader, second]
    scheduler.reset(scheduler.pool.renew(100, BLOCK_SIZE))
    for suspect, start, end in ((second, 0, 10), (leader, NUM_SHARED, 11)):
        step = next_step(scheduler)
        assert spans(step) == [(suspect, start, end)]
        answer(scheduler, step)
    assert [sequence for sequence, *_ in spans(next_step(scheduler))] == [second, leader]
    assert list(scheduler.waiting) == [third]


def test_a_sequence_that_reports_its_inputs_waits_for_no_sibling() -> None:
    siblings = Siblings()
    asked = Details(input_tokens=True)
    both = [Sequence(list(PROMPT), Stopping(4), details=asked, siblings=siblings) for _ in range(2)]
    assert spans(next_step(scheduler_of(*both))) == [(sequence, 0, 10) for sequence in both]


def test_siblings_share_one_encoder_output() -> None:
    leader, second, third = family(3, encoder_ids=ENCODER_INPUT)
    scheduler = scheduler_of(leader, second, third)
    step = next_step(scheduler)
    assert (spans(step), step.num_encoder_tokens) == ([(leader, 0, 1)], 5)
    ahead = next_step(scheduler)
    assert (spans(ahead), ahead.num_encoder_tokens) == ([(leader, 1, 2)], 0)
    answer(scheduler, step)
    joined = next_step(scheduler)
    assert [sequence for sequence, *_ in spans(joined)] == [leader, second, third]
    assert joined.num_encoder_tokens == 0
    assert leader.cross_blocks == second.cross_blocks == third.cross_blocks


@pytest.mark.parametrize("encoder_ids", [(), ENCODER_INPUT])
def test_only_equal_salts_share(encoder_ids: tuple[int, ...]) -> None:
    salts = [CacheSalt(), CacheSalt("a"), CacheSalt("b"), CacheSalt("", b"a"), CacheSalt("a", b"a")]
    scheduler, num_found = scheduler_of(), []
    for salt in (*salts, *salts):
        sequence = Sequence(list(PROMPT), Stopping(1), encoder_token_ids=encoder_ids, cache_salt=salt)
        before = scheduler.num_cache_hits
        scheduler.add(sequence)
        answer(scheduler, next_step(scheduler))
        scheduler.finish(sequence)
        num_found.append(scheduler.num_cache_hits - before)
    assert num_found == [0] * 5 + [NUM_SHARED + len(encoder_ids)] * 5


class Calm:
    """Families of sequences, and single ones, that all fit, in front of the model of a shard."""

    def __init__(self, seed: int) -> None:
        self.random = r = random.Random(seed)
        self.block_size, self.budget = r.choice([1, 2, 4, 8]), r.choice([3, 20, 1000])
        self.scheduler = Scheduler(BlockPool(2000, self.block_size), r.randint(1, 20))
        self.shard = ModelOfShard(2000, self.block_size, VOCAB_SIZE)
        self.depth, self.has_encoder = r.randint(1, 3), r.random() < 0.3
        self.arrivals, self.num_expected = list[Sequence](), 0
        for number in range(r.randint(1, 6)):
            self.arrivals += self.family(number)
        self.expected = {
            sequence: truth(
                sequence.token_ids,
                sequence.stopping.max_new_tokens,
                VOCAB_SIZE,
                list(sequence.encoder_token_ids),
            )
            for sequence in self.arrivals
        }
        # the last token of each is never computed
        self.num_expected += sum(len(self.expected[each]) - 1 - each.prompt_len for each in self.arrivals)
        self.live = set(self.arrivals)

    def family(self, number: int) -> list[Sequence]:
        """Return sequences of one prompt; no two families share a block."""
        r, siblings, count = self.random, Siblings(), self.random.randint(1, 6)
        ids = [number] + [r.randrange(VOCAB_SIZE) for _ in range(r.randint(0, 40))]
        prompt, encoder_ids = ([1], tuple(ids)) if self.has_encoder else (ids, ())
        num_shared = (len(prompt) - 1) // self.block_size * self.block_size
        self.num_expected += len(encoder_ids) + num_shared + count * (len(prompt) - num_shared)
        return [
            Sequence(
                list(prompt),
                Stopping(r.randint(1, 12), eos_token_ids=frozenset({0})),
                encoder_token_ids=encoder_ids,
                siblings=siblings,
            )
            for _ in range(count)
        ]

    def run(self) -> None:
        r, sent = self.random, deque[tuple[Step, pb.StepResponse]]()
        while self.live:
            while self.arrivals and r.random() < 0.7:
                self.scheduler.add(self.arrivals.pop(0))
            while len(sent) < self.depth and (step := self.scheduler.next_step(self.budget)) is not None:
                request = pb.StepRequest.FromString(encode_step(step).SerializeToString())
                sent.append((step, self.shard.execute(request)))
            assert sent or self.arrivals, "stuck with nothing in flight"
            if sent and r.random() < 0.7:
                self.apply(*sent.popleft())

    def apply(self, step: Step, response: pb.StepResponse) -> None:
        self.scheduler.apply_answer(step)
        for sequence, token, ended, *_ in decode_answer(step, response).sampled:
            if sequence in self.live:
                self.scheduler.append_token(sequence, token.token_id)
                if ended:
                    assert sequence.token_ids == self.expected[sequence]
                    self.live.remove(sequence)
                    self.scheduler.finish(sequence)


@pytest.mark.parametrize("batch", range(4))
def test_siblings_cost_one_prompt(batch: int) -> None:
    """Check any sizes, budgets and pipeline depths, without preemption and losses."""
    for seed in range(40 * batch, 40 * (batch + 1)):
        calm = Calm(seed)
        calm.run()
        assert calm.shard.num_computed + calm.shard.num_encoded == calm.num_expected
