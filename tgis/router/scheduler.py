"""Decides what the shards compute next. There is no prefill and no decode: a sequence has tokens that are not
computed yet, and every step computes some of them. Steps may be sent before earlier ones are answered."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from tgis.router.blocks import BlockPool
from tgis.router.sequence import Sequence


@dataclass(frozen=True)
class Work:
    """One sequence's part of a step: compute tokens [start, end), and sample the next one if `samples`."""

    sequence: Sequence
    row: int
    start: int
    end: int
    samples: bool
    opens: bool
    """The row is new to the shards with this step."""
    new_blocks: list[int]


@dataclass(eq=False)
class Step:
    """What all shards compute at once, and what becomes free when they have answered."""

    step_id: int
    work: list[Work]
    num_decodes: int
    """Leading entries of `work` that compute a single further token; the others compute prompts."""
    joins: bool
    """Newcomers join sequences that are running."""
    closed_rows: list[int]
    blocks_to_release: list[list[int]] = field(default_factory=list)

    @property
    def num_prompts(self) -> int:
        return len(self.work) - self.num_decodes

    @property
    def opened(self) -> list[Sequence]:
        return [work.sequence for work in self.work[self.num_decodes :] if work.opens]

    @property
    def num_tokens(self) -> int:
        return sum(work.end - work.start for work in self.work)


class Scheduler:
    """Owns the waiting and the running sequences, the rows and the blocks.

    Tokens of a running sequence, and how far each count reaches:

        | prompt ................... | generated ....... | unanswered |
        | num_computed ........ | in flight | num_pending ............ |
                                            ^ num_scheduled          ^ num_tokens
    """

    def __init__(self, pool: BlockPool, max_sequences: int) -> None:
        self.pool = pool
        self.waiting: deque[Sequence] = deque()
        self.running: dict[Sequence, None] = {}  # oldest first
        self.num_preemptions = 0
        self.num_deferred = 0
        """Times that the first waiting sequence found too few blocks."""
        self.num_cache_queries = self.num_cache_hits = 0
        """Tokens looked for, and found, in the prefix cache."""
        self._in_flight: deque[Step] = deque()
        self._free_rows = list(range(max_sequences))[::-1]
        self._closed_rows: list[int] = []
        self._last_step: dict[Sequence, Step] = {}  # the newest unanswered step that names the sequence
        self._num_steps = 0
        self._num_blocks_owed = 0  # blocks that become free with an answer

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def num_decoding(self) -> int:
        return sum(sequence.num_scheduled >= sequence.prompt_len for sequence in self.running)

    @property
    def num_running_tokens(self) -> int:
        """Prompt and known generated tokens of the running sequences."""
        return sum(len(sequence.token_ids) for sequence in self.running)

    @property
    def num_remaining_tokens(self) -> int:
        """What the running sequences may still generate, all together."""
        return sum(sequence.stopping.max_new_tokens - sequence.num_generated for sequence in self.running)

    def add(self, sequence: Sequence) -> None:
        """The sequence waits; a full-length one must fit into the pool."""
        self.waiting.append(sequence)

    def next_step(self, max_prompt_tokens: int) -> Step | None:
        """What to compute next, or None when nothing can be computed before a further answer or arrival.

        Every sequence with a single pending token takes part; longer ones share `max_prompt_tokens`, oldest
        first."""
        num_preemptions, budget = self.num_preemptions, max_prompt_tokens
        work = list(self._continue_decoding())
        num_decodes = len(work)
        for item in self._continue_prompts(budget):
            work.append(item)
            budget -= item.end - item.start
        num_running = len(self.running)
        if self.num_preemptions == num_preemptions:  # else memory is short: no newcomers
            for item in self._admit_waiting(budget):
                work.append(item)
                budget -= item.end - item.start
        joins = 0 < num_running < len(self.running)
        return self._send(work, num_decodes, joins) if work else None

    def apply_answer(self, step: Step) -> None:
        """The oldest step in flight has been answered: its tokens are in the cache."""
        assert next(iter(self._in_flight), None) is step, "steps are answered in order"
        self._in_flight.popleft()
        for work in step.work:
            sequence = work.sequence
            if self._last_step.get(sequence) is step:
                del self._last_step[sequence]
            if sequence.row is not None:  # preempted ones are not admitted again before their last answer
                sequence.num_computed = work.end
                self._publish(sequence)
        for blocks in step.blocks_to_release:
            self._num_blocks_owed -= len(blocks)
            self.pool.release(blocks)

    def append_token(self, sequence: Sequence, token_id: int) -> None:
        """A sampled token came back; called after apply_answer, also for a sequence that was preempted
        meanwhile."""
        sequence.num_unanswered -= 1
        sequence.token_ids.append(token_id)

    def finish(self, sequence: Sequence) -> None:
        """The sequence leaves, whatever its state; its unanswered tokens are for nobody."""
        if sequence in self.running:
            del self.running[sequence]
            self._drop(sequence)
        else:
            self.waiting.remove(sequence)

    def reset(self, pool: BlockPool) -> list[Sequence]:
        """The shards have lost everything: all sequences wait again, with the tokens they have.

        Returns the sequences of the oldest unanswered step, the first suspects."""
        suspects = [work.sequence for work in self._in_flight[0].work] if self._in_flight else []
        for step in self._in_flight:
            for work in step.work:
                work.sequence.num_unanswered = 0
        self.pool = pool
        self._in_flight.clear()
        self._last_step.clear()
        self._closed_rows.clear()
        self._num_blocks_owed = 0
        for sequence in reversed(self.running):
            self._free_rows.append(self._forget_place(sequence))
            self.waiting.appendleft(sequence)
        self.running.clear()
        return [sequence for sequence in suspects if sequence in self.waiting]

    def _continue_decoding(self) -> Iterator[Work]:
        for sequence in list(self.running):
            if sequence.num_pending != 1 or sequence.reached_limit or sequence not in self.running:
                continue
            num_missing = self.pool.blocks_for(sequence.num_tokens) - len(sequence.block_table)
            new_blocks = self._find_blocks(sequence, num_missing)
            if new_blocks is not None:
                sequence.block_table += new_blocks
                yield self._plan(sequence, sequence.num_tokens, new_blocks)

    def _continue_prompts(self, budget: int) -> Iterator[Work]:
        """Their blocks were taken at admission."""
        for sequence in self.running:
            if budget > 0 and sequence.num_pending > 1:
                end = min(sequence.num_tokens, sequence.num_scheduled + budget)
                budget -= end - sequence.num_scheduled
                yield self._plan(sequence, end, [])

    def _admit_waiting(self, budget: int) -> Iterator[Work]:
        """In order of arrival; who does not fit holds up those behind, so that nobody starves."""
        while self.waiting and budget > 0 and self._free_rows:
            sequence = self.waiting[0]
            if sequence in self._last_step or not self._take_place(sequence):
                return
            self.running[self.waiting.popleft()] = None
            end = min(sequence.num_tokens, sequence.num_scheduled + budget)
            budget -= end - sequence.num_scheduled
            yield self._plan(sequence, end, sequence.block_table, opens=True)

    def _take_place(self, sequence: Sequence) -> bool:
        """Row and blocks for all tokens it has; what the cache already holds needs no computing."""
        usable = (
            len(sequence.token_ids) - 1
        )  # the last token is computed in any case: the next is sampled from it
        if not sequence.inputs_reported:  # nor may positions be skipped whose outcome is still to be reported
            usable = min(usable, max(sequence.num_inputs_reported - 1, 0))
        cached, prefix = self.pool.match(sequence.prefix_root, sequence.token_ids[:usable])
        num_new = self.pool.blocks_for(len(sequence.token_ids)) - len(cached)
        blocks = self.pool.allocate(cached, num_new)
        if blocks is None:
            self.num_deferred += 1
            return False
        self.num_cache_queries += len(sequence.token_ids)
        self.num_cache_hits += len(cached) * self.pool.block_size
        sequence.row = self._free_rows.pop()
        sequence.block_table = blocks
        sequence.num_scheduled = sequence.num_computed = len(cached) * self.pool.block_size
        sequence.num_published, sequence.published_prefix = len(cached), prefix
        return True

    def _plan(self, sequence: Sequence, end: int, new_blocks: list[int], opens: bool = False) -> Work:
        assert sequence.row is not None
        start, samples = sequence.num_scheduled, end == sequence.num_tokens
        sequence.num_scheduled = end
        sequence.num_unanswered += samples
        return Work(sequence, sequence.row, start, end, samples, opens, list(new_blocks))

    def _send(self, work: list[Work], num_decodes: int, joins: bool) -> Step:
        step = Step(self._num_steps, work, num_decodes, joins, self._closed_rows)
        self._num_steps += 1
        self._closed_rows = []
        self._in_flight.append(step)
        for item in work:
            self._last_step[item.sequence] = step
        return step

    def _find_blocks(self, sequence: Sequence, num_blocks: int) -> list[int] | None:
        """Free blocks, if need be those of the youngest sequences; None when they are not to be had in this
        step."""
        if num_blocks <= 0:
            return []
        while (blocks := self.pool.allocate([], num_blocks)) is None:
            if self._num_blocks_owed >= num_blocks - self.pool.num_free:
                return None  # an answer will free them
            victim = next(reversed(self.running))
            self._preempt(victim)
            if victim is sequence:
                return None
        return blocks

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the head of the queue, to be computed again; its unanswered tokens still count."""
        del self.running[sequence]
        self._drop(sequence)
        self.waiting.appendleft(sequence)
        self.num_preemptions += 1

    def _drop(self, sequence: Sequence) -> None:
        """Blocks are free only after the last step that names them has been answered."""
        blocks, last_step = sequence.block_table, self._last_step.get(sequence)
        if last_step is None:
            self.pool.release(blocks)
        else:
            last_step.blocks_to_release.append(blocks)
            self._num_blocks_owed += len(blocks)
        row = self._forget_place(sequence)
        self._closed_rows.append(row)
        self._free_rows.append(row)

    def _publish(self, sequence: Sequence) -> None:
        size = self.pool.block_size
        for i in range(sequence.num_published, sequence.num_computed // size):
            tokens = sequence.token_ids[i * size : (i + 1) * size]
            prefix, block = sequence.published_prefix, sequence.block_table[i]
            sequence.published_prefix = self.pool.publish(prefix, tokens, block)
            sequence.num_published = i + 1

    @staticmethod
    def _forget_place(sequence: Sequence) -> int:
        row, sequence.row = sequence.row, None
        assert row is not None
        sequence.block_table = []
        sequence.num_scheduled = sequence.num_computed = sequence.num_published = 0
        return row
