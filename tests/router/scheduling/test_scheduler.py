"""Check random workloads through scheduler, block pool and messages, against the plain model of a shard.

The workloads include late answers, cancels, stops that only the router sees, refused rows, preemption and
lost shards. They use decoder-only and encoder-decoder models, long rotary frequencies, prompts, adapters,
salts, tenants, priorities, siblings, and reservation of whole lengths."""

import random
import zlib
from array import array
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import replace

import pytest

from tests.support.router.model_of_shard import (
    EOS,
    ModelOfShard,
    Row,
    integers,
    join_digests,
    next_token,
    truth,
)
from tgis.pb import shard_pb2 as pb
from tgis.router.scheduling.block_pool import BlockPool
from tgis.router.scheduling.prefix_cache import decoder_root
from tgis.router.scheduling.scheduler import Scheduler
from tgis.router.scheduling.state_pool import StatePool, choose_interval
from tgis.router.scheduling.step import NO_DRAFTS, DraftResult, Drafts, Step
from tgis.router.sequence import (
    AdapterInfo,
    AdapterKind,
    CacheSalt,
    CallAdapters,
    Details,
    Sequence,
    Siblings,
    Stopping,
)
from tgis.router.shards.codec import decode_answer, encode_step

BATCHES = 40  # of random workloads, one test each
QUICK_BATCHES = 8  # batches in `make test`
WORKLOADS = 50  # per batch
STATE_BATCHES, STATE_WORKLOADS = 4, 40  # of models that keep a state
DECODER_START, PAD = 1, 0


def is_refused(message: pb.OpenRow) -> bool:
    prompt = integers(message.token_ids)[: message.prompt_len]
    return zlib.crc32(array("i", prompt).tobytes() + message.encoder_token_ids) % 16 == 0


class LuckyProposer:
    """Propose the true tokens with some chance, within the scheduler's limits.

    Some or all drafts are left to the shards, whose `propose_in_shard` has the same chance and may propose
    fewer."""

    def __init__(self, workload: "Workload", r: random.Random) -> None:
        self.workload, self.random = workload, r
        self.luck, self.zeal = r.choice([0.0, 0.7, 0.9, 1.0]), r.choice([0.5, 0.9, 1.0])
        self.left = 0
        self.left_to_shards = r.choice([0.0, 0.5, 1.0])

    def begin(self, num_sequences: int, max_drafts: int) -> bool:
        self.left = max_drafts
        return max_drafts > 0

    def propose(self, sequence: Sequence, max_drafts: int) -> Drafts:
        r, known = self.random, sequence.num_tokens
        max_drafts = min(max_drafts, self.left)
        if max_drafts <= 0 or r.random() > self.zeal:
            return Drafts(waits=True) if known % 4 == 0 else NO_DRAFTS
        if r.random() < self.left_to_shards:
            allowed = r.randint(1, max_drafts)
            self.left -= allowed
            return Drafts(max_proposed=allowed)
        truth = self.workload.expected[sequence]
        drafts = [
            truth[place]
            if place < len(truth) and r.random() <= self.luck
            else r.randrange(self.workload.vocab_size)
            for place in range(known, known + r.randint(1, max_drafts))
        ]
        if not sequence.num_unanswered:
            self.left -= len(drafts)
        return Drafts(drafts)

    def follows(self, sequence: Sequence, num_sequences: int) -> bool:
        return True

    def observe(self, step: Step, results: Iterable[DraftResult], seconds: float, follow_s: float) -> None:
        """Learn nothing."""

    def propose_in_shard(self, row: Row, max_drafts: int) -> list[int]:
        """Propose drafts that depend only on the row, so that they are equal on every rank."""
        r, ids = random.Random(repr(row.token_ids)), list(row.token_ids)
        for _ in range(r.randint(0, max_drafts)):
            ids.append(next_token(ids, self.workload.vocab_size, row.context))
            if r.random() > self.luck:
                ids[-1] = r.randrange(self.workload.vocab_size)
        return ids[len(row.token_ids) :]


class Workload:
    """Drive a scheduler as the engine does, with random events from one seed."""

    def __init__(self, seed: int, keeps_state: bool = False) -> None:
        self.random = r = random.Random(seed)
        self.keeps_state = keeps_state
        self.num_states = random.Random(seed).randint(1, 16) if keeps_state else 0
        self.vocab_size = r.choice([2, 3, 50])
        self.block_size = r.choice([1, 2, 4, 8])
        self.has_encoder = r.random() < 0.4 and not keeps_state
        self.pool_blocks = r.randint(6 if self.has_encoder else 10, 40)
        if keeps_state:  # few blocks, so that sequences are preempted although slots limit their number
            self.pool_blocks = min(self.pool_blocks, 15)
        self.switch_len = r.choice([0, 0, r.randint(1, 6 if self.has_encoder else 25)])
        self.refuses = r.random() < 0.3
        max_sequences = r.randint(1, 8)
        self.proposer = self._proposer(random.Random(-1 - seed))
        self.reserves = random.Random(seed + (2 << 32)).random() < 0.15
        self.scheduler = Scheduler(self._pool(), max_sequences, self.switch_len, self.proposer, self.reserves)
        self.max_sequences = max_sequences
        self.shard = self._shard()
        self.depth = r.randint(1, 3)
        self.max_prompt_tokens = r.randint(1, 30)
        self.late = r.choice([0.0, 0.5, 0.9])
        self.loss, self.cancel = r.choice([0.0, 0.02]), r.choice([0.0, 0.02])
        self.num_proposed = self.num_sent_drafts = self.num_counted = 0
        self.num_losses = self.num_refusals = self.num_culprits = 0
        # Where sequences kill the shards, nothing else does; otherwise innocent sequences might be blamed.
        self.deadly_share = 0.0 if self.loss else random.Random(~seed).choice([0.0, 0.0, 0.1, 0.3])
        self.deadly: dict[Sequence, int] = {}  # the number of tokens of each that the shards can compute
        self.suspects: list[Sequence] = []
        self.sent: deque[tuple[Step, pb.StepRequest]] = deque()
        self.executed: deque[tuple[Step, pb.StepResponse]] = deque()
        self.expected: dict[Sequence, list[int]] = {}
        self.queue: list[Sequence] = []  # sequences that have not started, oldest first
        self.reported: dict[Sequence, list[int]] = {}
        self.ends: Counter[Sequence] = Counter()
        self.adapters = self._adapters(random.Random(seed))
        self.num_held = self.num_taken_over = 0
        self.salts_of_blocks: dict[int, CacheSalt] = {}
        self.todo = self._with_siblings(random.Random(seed + (1 << 32)))

    def _proposer(self, r: random.Random) -> LuckyProposer | None:
        return LuckyProposer(self, r) if r.random() < 0.7 and not self.keeps_state else None

    def _pool(self) -> BlockPool:
        interval = self.block_size * random.Random(self.pool_blocks).randint(1, 6)
        states = StatePool(self.num_states, interval) if self.keeps_state else None
        return BlockPool(self.pool_blocks, self.block_size, states=states)

    def _shard(self) -> ModelOfShard:
        sizes = self.pool_blocks, self.block_size, self.vocab_size, self.switch_len, self.num_states
        shard = ModelOfShard(*sizes)
        if self.refuses:
            shard.refuses = is_refused
        if self.proposer is not None:
            shard.propose = self.proposer.propose_in_shard
        return shard

    def _adapters(self, r: random.Random) -> list[CallAdapters]:
        """Use prompts and adapters in all combinations, in every third workload."""
        if r.random() < 0.67:
            return [CallAdapters()]
        prompts: list[AdapterInfo | None] = [None]
        for digest in "pq":
            num_encoder = r.randint(0, 3) * self.has_encoder
            prompts.append(AdapterInfo(AdapterKind.SOFT_PROMPT, digest, r.randint(0, 3), num_encoder))
        adapters = [None, AdapterInfo(AdapterKind.LORA, "p"), AdapterInfo(AdapterKind.LORA, "a")]
        return [CallAdapters(prompt, adapter) for prompt in prompts for adapter in adapters]

    def _requests(self) -> list[Sequence]:
        r = self.random
        prefixes = [[r.randrange(self.vocab_size) for _ in range(r.randint(0, 20))] for _ in range(3)]
        requests = []
        for _ in range(r.randint(1, 25)):
            prompt = r.choice(prefixes) + [r.randrange(self.vocab_size) for _ in range(r.randint(1, 8))]
            stopping = Stopping(max_new_tokens=r.randint(1, 12), eos_token_ids=frozenset({EOS}))
            request = self._request(prompt, stopping, Details(input_tokens=r.random() < 0.2))
            num_tokens = request.prompt_len + len(request.encoder_token_ids) + stopping.max_new_tokens
            if -(-num_tokens // self.block_size) < self.pool_blocks:
                requests.append(request)
        return requests

    def _request(self, prompt: list[int], stopping: Stopping, details: Details) -> Sequence:
        adapters = self.random.choice(self.adapters)
        before = [PAD] * adapters.num_decoder_tokens
        if not self.has_encoder:
            return Sequence(before + prompt, stopping, details=details, adapters=adapters)
        encoder_ids = prompt[: self.random.choice([len(prompt), 5])]  # some of them equal
        encoder_ids = [PAD] * adapters.num_encoder_tokens + encoder_ids
        start = [*before, DECODER_START]
        return Sequence(
            start, stopping, details=details, encoder_token_ids=tuple(encoder_ids), adapters=adapters
        )

    def _with_siblings(self, r: random.Random) -> list[Sequence]:
        """Return the requests in order of arrival, with salts and with siblings of different limits."""
        salts = r.choice([(CacheSalt(),), (CacheSalt("a"), CacheSalt("b"), CacheSalt("a", b"x"))])
        share, arrivals = r.choice([0.0, 0.0, 0.3, 1.0]), []
        priorities = r.choice([(0,), (0, 0, -1, 2)])
        for request in self._requests():
            siblings, salt, priority = Siblings(), r.choice(salts), r.choice(priorities)
            for number in range(r.randint(1, 4) if r.random() < share else 1):
                limit = request.stopping.max_new_tokens
                sequence = replace(
                    request,
                    token_ids=list(request.token_ids),
                    stopping=replace(
                        request.stopping, max_new_tokens=r.randint(1, limit) if number else limit
                    ),
                    details=Details() if number and r.random() < 0.8 else request.details,
                    cache_salt=salt,
                    siblings=siblings,
                    priority=priority,
                    block_table=[],
                    cross_blocks=[],
                )
                arrivals.append(sequence)
        return arrivals[::-1]

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
                self.execute(*self.sent.popleft())
            if self.executed and r.random() >= self.late:
                self.take_answer()
            if r.random() < self.loss and self.num_losses < 5:
                self.lose_shards()
            for sequence in list(self.expected):
                if r.random() < self.cancel:
                    self.end(sequence)
        while self.sent or self.executed:
            while self.sent:
                self.execute(*self.sent.popleft())
            if self.executed:
                self.take_answer()
        if not (self.loss or self.cancel or self.refuses or self.deadly_share):
            assert self.scheduler.num_drafts == self.num_sent_drafts + self.shard.num_proposed
            assert self.scheduler.num_accepted_drafts == self.shard.num_right
            self.num_counted += self.shard.num_proposed
        if self.reserves and not self.num_losses:  # after a loss, suspects run alone
            assert self.scheduler.num_preemptions == 0
        assert self.scheduler.pool.num_used == 0
        counts = [self.scheduler.pool.resource_count, self.scheduler.rows.resource_count]
        if (states := self.scheduler.pool.states) is not None:
            assert states.num_used == 0
            counts.append(states.resource_count)
        assert all(count.is_balanced for count in counts)
        assert not self.scheduler.running
        assert not self.scheduler.waiting
        assert set(self.ends.values()) <= {1}

    def start(self, sequence: Sequence) -> None:
        self.expected[sequence] = truth(
            sequence.token_ids,
            sequence.stopping.max_new_tokens,
            self.vocab_size,
            list(sequence.encoder_token_ids),
            self.switch_len,
            join_digests(
                *(
                    one.digest if one else ""
                    for one in (sequence.adapters.lora, sequence.adapters.soft_prompt)
                )
            ),
        )
        self.reported[sequence] = []
        r = random.Random(repr(sequence.token_ids))
        if r.random() < self.deadly_share:
            self.deadly[sequence] = r.randrange(len(self.expected[sequence]))
        self.scheduler.add(sequence)
        self.queue.append(sequence)

    def send(self) -> None:
        while self.scheduler.num_in_flight < self.depth:
            step = self.scheduler.next_step(self.max_prompt_tokens)
            if step is None:
                assert self.scheduler.num_in_flight or not self.expected, "stuck with nothing in flight"
                return
            request = encode_step(step)
            self.check_size(step, request)
            self.check_turns(step)
            self.check_salts(step)
            self.suspects = [suspect for suspect in self.suspects if suspect in self.expected]
            if self.suspects:
                assert [work.sequence for work in step.work] == self.suspects[:1]
                assert self.scheduler.num_in_flight == 1
            self.sent.append((step, pb.StepRequest.FromString(request.SerializeToString())))

    def check_turns(self, step: Step) -> None:
        """Check that no sequence starts before an older one of its tenant and priority, unless the older one
        waits for a sibling."""
        for work in step.work:
            if work.sequence in self.queue:
                own = work.sequence.cache_salt.tenant, work.sequence.priority
                place = self.queue.index(work.sequence)
                older = [
                    each for each in self.queue[:place] if (each.cache_salt.tenant, each.priority) == own
                ]
                assert all(map(self.may_wait_for_sibling, older))
                self.num_held += place
                del self.queue[place]

    def may_wait_for_sibling(self, sequence: Sequence) -> bool:
        """Return whether the sequence's prompt is not entirely in the cache."""
        return any(
            other.siblings is sequence.siblings and other.num_computed < other.prompt_len
            for other in self.scheduler.running
        )

    def check_salts(self, step: Step) -> None:
        """Check that every block a sequence reads was written under its own salt."""
        for work in step.work:
            sequence, first = work.sequence, work.start // self.block_size
            read, written = sequence.block_table[:first], sequence.block_table[first:]
            if work.opens:
                (written if sequence.num_to_encode else read).extend(sequence.cross_blocks)
            assert all(self.salts_of_blocks[block] == sequence.cache_salt for block in read)
            self.salts_of_blocks |= dict.fromkeys(written, sequence.cache_salt)

    def check_size(self, step: Step, request: pb.StepRequest) -> None:
        """Check that prompts share the budget; a larger encoder input runs without other prompts."""
        inputs = [row.encoder_token_ids for row in request.opened_rows if not row.is_encoded]
        num_encoder_tokens = sum(len(integers(column)) for column in inputs)
        chunks = [work.end - work.start for work in step.work]
        num_drafts = sum(work.drafts.max_tokens for work in step.work)
        self.num_sent_drafts += len(integers(request.draft_ids))
        assert step.num_tokens == num_encoder_tokens + sum(chunks) + num_drafts
        assert step.num_prompt_tokens == num_encoder_tokens + sum(chunks[step.num_decodes :])
        num_samples = num_drafts + sum(work.samples for work in step.work)
        assert num_samples <= self.max_sequences
        prompts = chunks[step.num_decodes :] + [1] * num_drafts
        if num_encoder_tokens + sum(prompts) > self.max_prompt_tokens:
            assert num_encoder_tokens
            assert prompts == [1] + [1] * num_drafts

    def take_answer(self) -> None:
        step, response = self.executed.popleft()
        answer = decode_answer(step, response)
        for failure in answer.failed:
            if failure.sequence in self.expected:
                self.num_refusals += 1
                self.end(failure.sequence)
        assert answer.num_tokens == step.num_tokens - step.max_proposed + answer.num_proposed
        self.num_proposed += answer.num_proposed
        self.scheduler.apply_answer(step, answer.num_proposed)
        for details in answer.input_details:
            if details.sequence in self.expected:
                assert details.start == details.sequence.num_inputs_reported
                details.sequence.num_inputs_reported += len(details.tokens)
                self.reported[details.sequence] += [token.token_id for token in details.tokens]
        for sampled in answer.sampled:
            if sampled.sequence in self.expected:
                self.take_token(sampled.sequence, sampled.token.token_id, sampled.ended)

    def execute(self, step: Step, request: pb.StepRequest) -> None:
        """Compute the step, unless it kills the shards."""
        if any(work.end > self.deadly.get(work.sequence, work.end) for work in step.work):
            # Answers of earlier steps may still be in transit; here they are lost as well.
            self.sent.appendleft((step, request))
            self.lose_shards()
        else:
            self.executed.append((step, self.shard.execute(request)))

    def take_token(self, sequence: Sequence, token: int, ended: bool) -> None:
        if sequence in self.suspects:
            self.suspects.remove(sequence)
        self.scheduler.append_token(sequence, token)
        expected = self.expected[sequence]
        assert sequence.token_ids == expected[: len(sequence.token_ids)]
        assert ended == (len(sequence.token_ids) == len(expected))
        if sequence.details.input_tokens and not self.has_encoder:
            assert self.reported[sequence] == expected[: sequence.prompt_len], (
                "all inputs before the first token"
            )
        if ended or self.random.random() < self.cancel:  # like a stop sequence, which only the router sees
            self.end(sequence)

    def end(self, sequence: Sequence) -> None:
        self.ends[sequence] += 1
        if sequence.siblings.newest is sequence and sequence.num_computed < sequence.prompt_len:
            self.num_taken_over += any(other.siblings is sequence.siblings for other in self.queue)
        if sequence in self.queue:
            self.queue.remove(sequence)
        del self.expected[sequence]
        self.scheduler.finish(sequence)

    def lose_shards(self) -> None:
        self.num_losses += 1
        unanswered = [step for step, _ in [*self.executed, *self.sent]]
        tried = [work.sequence for step in unanswered[:1] for work in step.work]
        tried = [sequence for sequence in tried if sequence in self.expected]
        self.suspects = [*reversed(tried), *(each for each in self.suspects if each not in tried)]
        self.sent.clear()
        self.executed.clear()
        self.shard = self._shard()
        culprit = self.scheduler.reset(self.scheduler.pool.renew(self.pool_blocks, self.block_size))
        if culprit is not None:
            assert tried == [culprit]
            assert culprit in self.deadly or self.loss
            self.suspects = []
            self.num_culprits += 1
            self.end(culprit)

    def check_blocks(self) -> None:
        """Check that no block is lost, and that a block has one place unless a prefix is shared."""
        pool, holders = self.scheduler.pool, Counter[int]()
        row_counts = self.scheduler.rows.resource_count
        for sequence in self.scheduler.running:
            blocks = [*sequence.cross_blocks, *sequence.block_table]
            if self.reserves:
                assert len(sequence.block_table) == -(-(sequence.max_tokens - 1) // self.block_size)
            assert len(set(blocks)) == len(blocks)
            holders.update(blocks)
        owed = {step for step, _ in [*self.sent, *self.executed]}
        for step in owed:
            for blocks in step.blocks_to_release:
                holders.update(blocks)
        assert len(holders) == pool.num_used
        assert len(holders) + pool.num_free == pool.num_blocks
        assert len(holders) == pool.resource_count.created - pool.resource_count.released
        if pool.states is not None:
            slots = [sequence.state_slot for sequence in self.scheduler.running]
            slots += [work.state_save for step in owed for work in step.work if work.state_save is not None]
            assert len(set(slots)) == len(slots) == pool.states.num_used
        rows = [sequence.row for sequence in self.scheduler.running]
        assert len(set(rows)) == len(rows) == row_counts.created - row_counts.released


@pytest.mark.parametrize(
    "batch",
    [
        *range(QUICK_BATCHES),
        *(pytest.param(i, marks=pytest.mark.slow) for i in range(QUICK_BATCHES, BATCHES)),
    ],
)
def test_outcomes_never_depend_on_scheduling(batch: int) -> None:
    for seed in range(batch * WORKLOADS, (batch + 1) * WORKLOADS):
        Workload(seed).run()


@pytest.mark.parametrize("batch", range(STATE_BATCHES))
def test_outcomes_never_depend_on_snapshots(batch: int) -> None:
    """Every row must begin with the state of its prefix, whatever was evicted, preempted or lost."""
    met: Counter[str] = Counter()
    for seed in range(batch * STATE_WORKLOADS, (batch + 1) * STATE_WORKLOADS):
        workload = Workload(seed, keeps_state=True)
        workload.run()
        met["resumed"] += workload.shard.num_resumed
        met["preempted"] += workload.scheduler.num_preemptions
        met["deferred"] += workload.scheduler.num_deferred
        met["lost"] += workload.num_losses
        met["stopped"] += bool(workload.cancel)
    assert len(met) == 5
    assert min(met.values()) > 3, met


def test_an_interval_lets_the_snapshots_of_four_long_sequences_fit() -> None:
    assert choose_interval(1000, 4096, 16) == 256
    assert choose_interval(32, 4096, 16) == 512
    assert choose_interval(1, 100, 16) == 400


def test_a_prefix_is_cut_back_to_its_last_snapshot() -> None:
    """Also while its blocks are cached, and down to nothing if it has no snapshot."""
    pool = BlockPool(40, 4, states=StatePool(3, 16))
    scheduler = Scheduler(pool, max_sequences=2)
    starts = []
    for length in (30, 30, 23, 13):
        scheduler.add(sequence := Sequence([1] * length, Stopping(max_new_tokens=1)))
        spans = []
        while (step := scheduler.next_step(100)) is not None:
            spans += [(work.start, work.end) for work in step.work]
            scheduler.apply_answer(step)
        starts.append(spans)
        scheduler.finish(sequence)
    assert starts == [[(0, 16), (16, 28), (28, 30)], [(28, 30)], [(16, 20), (20, 23)], [(0, 12), (12, 13)]]


@pytest.mark.slow
def test_the_workloads_reach_every_case() -> None:
    """Check that the random workloads reach every case."""
    met: Counter[str] = Counter()
    for seed in range(250):
        workload = Workload(seed)
        prompts = sum(sequence.prompt_len for sequence in workload.todo)
        inputs = sum(len(sequence.encoder_token_ids) for sequence in workload.todo)
        workload.run()
        scheduler, shard, kind = workload.scheduler, workload.shard, "cross " * workload.has_encoder
        met[kind + "preemptions"] += scheduler.num_preemptions
        met[kind + "reservations deferred"] += scheduler.num_deferred if workload.reserves else 0
        met[kind + "long"] += shard.num_long
        if not workload.num_losses + workload.num_refusals:
            met[kind + "hits"] += inputs > shard.num_encoded if kind else prompts > shard.num_computed
        met[kind + "refusals"] += workload.num_refusals
        met[kind + "losses"] += workload.num_losses
        met[kind + "culprits"] += workload.num_culprits
        met[kind + "right drafts"] += scheduler.num_accepted_drafts
        met[kind + "wrong drafts"] += scheduler.num_drafts - scheduler.num_accepted_drafts
        met["counted drafts of shards"] += workload.num_counted
        met[kind + "held"] += workload.num_held
        met[kind + "taken over"] += workload.num_taken_over
        met[kind + "salts"] += len(set(workload.salts_of_blocks.values())) > 1
        if workload.num_proposed:
            met["losses with drafts of shards"] += workload.num_losses
            met["preemptions with drafts of shards"] += scheduler.num_preemptions
        if scheduler.num_accepted_drafts:
            met["losses with drafts"] += workload.num_losses
            met["preemptions with drafts"] += scheduler.num_preemptions
    print(met)
    assert len(met) == 29
    assert min(met.values()) > 10, met


def test_no_sequence_overtakes_one_that_waits_for_blocks() -> None:
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
    for _ in range(2):  # each of the two needs another block for its second token
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
    sequence = Sequence(list(prompt), Stopping(max_new_tokens=9))
    root = decoder_root(sequence)
    scheduler.add(sequence)
    first, second = scheduler.next_step(5), scheduler.next_step(100)
    assert first is not None
    assert second is not None
    assert len(pool.match(root, prompt)[0]) == 0
    scheduler.apply_answer(first)
    assert len(pool.match(root, prompt)[0]) == 1
    scheduler.apply_answer(second)
    assert len(pool.match(root, prompt)[0]) == 2


def test_a_sequence_that_outgrows_the_switch_length_starts_over_once() -> None:
    scheduler = Scheduler(BlockPool(20, 2), max_sequences=4, rope_switch_len=6)
    first, second = (Sequence([i] * 4, Stopping(max_new_tokens=20)) for i in (1, 2))
    scheduler.add(first)
    scheduler.add(second)
    spans = []
    for _ in range(6):
        step = scheduler.next_step(100)
        assert step is not None
        spans.append([(work.start, work.end, work.opens) for work in step.work])
        scheduler.apply_answer(step)
        for work in step.work:
            scheduler.append_token(work.sequence, 5)
    start_over = [(0, 7, True)] * 2  # although the cache holds the prefixes, as those of short sequences
    once, then = [(4, 5, False)] * 2, [(7, 8, False)] * 2
    assert spans == [[(0, 4, True)] * 2, once, [(5, 6, False)] * 2, start_over, then, [(8, 9, False)] * 2]
    assert scheduler.num_preemptions == 0
    assert list(scheduler.running) == [first, second]


def test_long_and_short_sequences_share_no_prefix() -> None:
    scheduler = Scheduler(BlockPool(40, 2), max_sequences=8, rope_switch_len=6)
    starts = []
    for size in (6, 5, 7, 9, 8, 6):
        scheduler.add(Sequence([1] * size, Stopping(max_new_tokens=1)))
        step = scheduler.next_step(100)
        assert step is not None
        starts.append(step.work[0].start)
        scheduler.apply_answer(step)
    assert starts == [0, 4, 0, 6, 6, 4]


def test_one_that_needs_no_token_past_the_switch_length_stays_as_it_is() -> None:
    scheduler = Scheduler(BlockPool(20, 2), max_sequences=4, rope_switch_len=6)
    scheduler.add(Sequence([1] * 6, Stopping(max_new_tokens=1)))
    assert scheduler.next_step(100) is not None
    assert scheduler.next_step(100) is None
    assert len(scheduler.running) == 1
