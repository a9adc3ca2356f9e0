"""Random workloads through scheduler, blocks and messages, against the plain model of a shard: late answers,
cancels, stops that only the router sees, preemption, lost shards."""

import random
from collections import Counter, deque

import pytest

from tests.router.model_of_shard import EOS, ModelOfShard, truth
from tgis.pb import shard_pb2 as pb
from tgis.router.blocks import BlockPool
from tgis.router.columns import decode_answer, encode_step
from tgis.router.scheduler import Scheduler, Step
from tgis.router.sequence import Details, Sequence, Stopping

BATCHES = 40  # of random workloads, in one test each
WORKLOADS = 50  # per batch


class Workload:
    """Drives a scheduler as the engine does, with everything that can happen to it drawn from one seed."""

    def __init__(self, seed: int) -> None:
        self.random = r = random.Random(seed)
        self.vocab_size = r.choice([2, 3, 50])
        self.block_size = r.choice([1, 2, 4, 8])
        self.pool_blocks = r.randint(10, 40)
        self.scheduler = Scheduler(self._pool(), r.randint(1, 8))
        self.shard = self._shard()
        self.depth = r.randint(1, 3)
        self.max_prompt_tokens = r.randint(1, 30)
        self.late = r.choice([0.0, 0.5, 0.9])
        self.loss, self.cancel = r.choice([0.0, 0.02]), r.choice([0.0, 0.02])
        self.num_losses = 0
        self.sent: deque[tuple[Step, pb.StepRequest]] = deque()
        self.executed: deque[tuple[Step, pb.StepResponse]] = deque()
        self.expected: dict[Sequence, list[int]] = {}
        self.reported: dict[Sequence, list[int]] = {}
        self.ends: Counter[Sequence] = Counter()
        self.todo = self._requests()

    def _pool(self) -> BlockPool:
        return BlockPool(self.pool_blocks, self.block_size)

    def _shard(self) -> ModelOfShard:
        return ModelOfShard(self.pool_blocks, self.block_size, self.vocab_size)

    def _requests(self) -> list[Sequence]:
        r = self.random
        prefixes = [[r.randrange(self.vocab_size) for _ in range(r.randint(0, 20))] for _ in range(3)]
        requests = []
        for _ in range(r.randint(1, 25)):
            prompt = r.choice(prefixes) + [r.randrange(self.vocab_size) for _ in range(r.randint(1, 8))]
            stopping = Stopping(max_new_tokens=r.randint(1, 10), eos_token_ids=frozenset({EOS}))
            if -(-(len(prompt) + stopping.max_new_tokens) // self.block_size) <= self.pool_blocks:
                details = Details(input_tokens=r.random() < 0.2)
                requests.append(Sequence(prompt, stopping, details=details))
        return requests

    def run(self) -> None:
        r, num_turns = self.random, 0
        while self.todo or self.expected:
            num_turns += 1
            assert num_turns < 20_000, "no progress"
            while self.todo and r.random() < 0.5:
                self.start(self.todo.pop())
            self.send()
            self.check_blocks()
            if self.sent and r.random() >= self.late:
                step, request = self.sent.popleft()
                self.executed.append((step, self.shard.execute(request)))
            if self.executed and r.random() >= self.late:
                self.take_answer()
            if r.random() < self.loss and self.num_losses < 5:
                self.lose_shards()
            for sequence in list(self.expected):
                if r.random() < self.cancel:
                    self.end(sequence)
        while self.sent or self.executed:
            self.executed += [(step, self.shard.execute(request)) for step, request in self.sent]
            self.sent.clear()
            self.take_answer()
        assert self.scheduler.pool.num_used == 0
        assert not self.scheduler.running
        assert not self.scheduler.waiting
        assert set(self.ends.values()) <= {1}

    def start(self, sequence: Sequence) -> None:
        self.expected[sequence] = truth(sequence.token_ids, sequence.stopping.max_new_tokens, self.vocab_size)
        self.reported[sequence] = []
        self.scheduler.add(sequence)

    def send(self) -> None:
        while self.scheduler.num_in_flight < self.depth:
            step = self.scheduler.next_step(self.max_prompt_tokens)
            if step is None:
                assert self.scheduler.num_in_flight or not self.expected, "stuck with nothing in flight"
                return
            chunks = [work.end - work.start for work in step.work if work.end - work.start > 1]
            assert sum(chunks) <= self.max_prompt_tokens
            request = encode_step(step)
            self.sent.append((step, pb.StepRequest.FromString(request.SerializeToString())))

    def take_answer(self) -> None:
        step, response = self.executed.popleft()
        answer = decode_answer(step, response)
        self.scheduler.apply_answer(step)
        for details in answer.input_details:
            if details.sequence in self.expected:
                assert details.start == details.sequence.num_inputs_reported
                details.sequence.num_inputs_reported += len(details.tokens)
                self.reported[details.sequence] += [token.token_id for token in details.tokens]
        for sampled in answer.sampled:
            if sampled.sequence in self.expected:
                self.take_token(sampled.sequence, sampled.token.token_id, sampled.ended)

    def take_token(self, sequence: Sequence, token: int, ended: bool) -> None:
        self.scheduler.append_token(sequence, token)
        expected = self.expected[sequence]
        assert sequence.token_ids == expected[: len(sequence.token_ids)]
        assert ended == (len(sequence.token_ids) == len(expected))
        if sequence.details.input_tokens:
            assert self.reported[sequence] == expected[: sequence.prompt_len], (
                "all inputs before the first token"
            )
        if ended or self.random.random() < self.cancel:  # as by a stop sequence, which only the router sees
            self.end(sequence)

    def end(self, sequence: Sequence) -> None:
        self.ends[sequence] += 1
        del self.expected[sequence]
        self.scheduler.finish(sequence)

    def lose_shards(self) -> None:
        self.num_losses += 1
        self.sent.clear()
        self.executed.clear()
        self.shard = self._shard()
        self.scheduler.reset(self._pool())

    def check_blocks(self) -> None:
        """No block lost, none in two places that are not one prefix."""
        pool, holders = self.scheduler.pool, Counter[int]()
        for sequence in self.scheduler.running:
            assert len(set(sequence.block_table)) == len(sequence.block_table)
            holders.update(sequence.block_table)
        owed = {step for step, _ in [*self.sent, *self.executed]}
        for step in owed:
            for blocks in step.blocks_to_release:
                holders.update(blocks)
        assert len(holders) == pool.num_used
        assert len(holders) + pool.num_free == pool.num_blocks
        rows = [sequence.row for sequence in self.scheduler.running]
        assert len(set(rows)) == len(rows)


@pytest.mark.parametrize("batch", range(BATCHES))
def test_outcomes_never_depend_on_scheduling(batch: int) -> None:
    for seed in range(batch * WORKLOADS, (batch + 1) * WORKLOADS):
        Workload(seed).run()


def test_the_workloads_meet_what_they_are_for() -> None:
    """Else the test above would show nothing."""
    num_preemptions = num_saved = 0
    for seed in range(100):
        workload = Workload(seed)
        prompts = sum(sequence.prompt_len for sequence in workload.todo)
        workload.run()
        num_preemptions += workload.scheduler.num_preemptions
        num_saved += prompts > workload.shard.num_computed
    assert num_preemptions > 20
    assert num_saved > 5


def test_nobody_overtakes_a_sequence_that_waits_for_room() -> None:
    scheduler = Scheduler(BlockPool(8, 4), max_sequences=4)
    first, big, small = (Sequence([1] * size, Stopping(max_new_tokens=4)) for size in (20, 24, 3))
    for sequence in (first, big, small):
        scheduler.add(sequence)
    step = scheduler.next_step(1000)
    assert step is not None
    assert [work.sequence for work in step.work] == [first]
    assert list(scheduler.waiting) == [big, small]


def test_blocks_stay_taken_until_the_last_step_that_names_them_is_answered() -> None:
    pool = BlockPool(4, 4)
    scheduler = Scheduler(pool, max_sequences=4)
    sequence = Sequence([1, 2, 3], Stopping(max_new_tokens=8))
    scheduler.add(sequence)
    prompt, token = scheduler.next_step(100), scheduler.next_step(100)
    assert prompt is not None
    assert token is not None
    scheduler.apply_answer(prompt)
    scheduler.append_token(sequence, 7)
    scheduler.finish(sequence)
    assert pool.num_used == 1
    scheduler.apply_answer(token)
    assert pool.num_used == 0


def test_a_preempted_sequence_goes_before_newcomers() -> None:
    pool = BlockPool(4, 4)
    scheduler = Scheduler(pool, max_sequences=4)
    old, young, newcomer = (Sequence([i] * 7, Stopping(max_new_tokens=9)) for i in range(3))
    scheduler.add(old)
    scheduler.add(young)
    step = scheduler.next_step(100)
    scheduler.add(newcomer)
    for _ in range(2):  # the second token needs a further block for each of the two
        assert step is not None
        scheduler.apply_answer(step)
        for work in step.work:
            scheduler.append_token(work.sequence, 5)
        step = scheduler.next_step(100)
    assert scheduler.num_preemptions == 1
    assert list(scheduler.running) == [old]
    assert list(scheduler.waiting) == [young, newcomer]


def test_a_block_is_found_once_it_is_computed_and_not_before() -> None:
    pool = BlockPool(8, 4)
    scheduler = Scheduler(pool, max_sequences=4)
    prompt = list(range(10))
    scheduler.add(Sequence(list(prompt), Stopping(max_new_tokens=9)))
    first, second = scheduler.next_step(5), scheduler.next_step(100)
    assert first is not None
    assert second is not None
    assert len(pool.match((), prompt)[0]) == 0
    scheduler.apply_answer(first)
    assert len(pool.match((), prompt)[0]) == 1
    scheduler.apply_answer(second)
    assert len(pool.match((), prompt)[0]) == 2
