"""Scheduler: decides what the shards compute next. It has no prefill and decode phases: a sequence has tokens
that are not computed yet, and every step computes some of them. Steps may be sent before earlier steps are
answered."""

from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as AnySequence
from functools import partial
from itertools import islice

from tgis.router.scheduling.block_pool import BlockPool
from tgis.router.scheduling.crash_suspects import CrashSuspects
from tgis.router.scheduling.free_rows import FreeRows
from tgis.router.scheduling.prefix_cache import (
    Cached,
    accept_draft,
    find_cached,
    publish_computed,
    publish_encoded,
    publish_state,
    reset_progress,
    take_blocks,
    waits_for_sibling,
)
from tgis.router.scheduling.proposers.interface import Proposer
from tgis.router.scheduling.step import NO_DRAFTS, Drafts, Step, WorkItem
from tgis.router.scheduling.waiting_queue import WaitingQueue
from tgis.router.sequence import Sequence


class Scheduler:
    """Owner of the waiting and running sequences, the rows and the blocks.

    Tokens of a running sequence, and the extent of each count:

        | prompt ................... | generated ....... | unanswered |
        | num_computed ........ | in flight | num_pending ............ |
                                            ^ num_scheduled          ^ num_tokens
    """

    def __init__(
        self,
        pool: BlockPool,
        max_sequences: int,
        rope_switch_len: int = 0,
        proposer: Proposer | None = None,
        reserves_output: bool = False,
    ) -> None:
        """Create a scheduler without sequences. Sequences of more than `rope_switch_len` tokens are computed
        differently from their first token on; 0 means that the model has no such length. Without a
        `proposer`, there is no speculation. With `reserves_output`, a sequence takes the blocks for its
        maximum length at admission, so that only a crash suspect can preempt it. If the pool has states, the
        proposer leaves drafts to the shards, which roll the states back."""
        self.pool = pool
        self.max_sequences = max_sequences
        self.proposer = proposer
        self._rope_switch_len = rope_switch_len
        self._reserves_output = reserves_output
        self.waiting = WaitingQueue()
        self.running: dict[Sequence, None] = {}  # oldest first
        self.num_preemptions = 0
        self.num_deferred = 0  # number of admissions that failed because there were too few free blocks
        self.num_cache_queries = 0  # tokens looked up in the prefix cache
        self.num_cache_hits = 0  # tokens found in the prefix cache
        self.num_drafts = self.num_accepted_drafts = 0
        self._crash_suspects = CrashSuspects()
        self._in_flight: deque[Step] = deque()
        self.rows = FreeRows(max_sequences)
        self._last_step: dict[Sequence, Step] = {}  # newest unanswered step of each sequence
        self._num_steps = 0
        self._num_blocks_owed = 0  # blocks that the answers in flight will free

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def num_decoding(self) -> int:
        return sum(sequence.num_scheduled >= sequence.prompt_len for sequence in self.running)

    def add(self, sequence: Sequence) -> None:
        """Add a sequence to the queue. The pool must be large enough for its maximum length."""
        self.waiting.add(sequence)

    def next_step(self, max_prompt_tokens: int) -> Step | None:
        """Return the next step, or None if nothing can be computed before the next answer or arrival. It
        includes every sequence with a single pending token. Sequences with more share `max_prompt_tokens`,
        oldest first; drafts take up to half of it. Encoder input counts too, and may exceed it as the only
        prompt work."""
        if self._rope_switch_len:
            self._put_back_outgrown()
        if (suspect := self._crash_suspects.next) is not None:
            return None if self._in_flight else self._try_alone(suspect, max_prompt_tokens)
        num_preemptions = self.num_preemptions
        decodes = list(self._continue_decoding(max_prompt_tokens // 2))
        if self.proposer is not None:
            max_prompt_tokens -= sum(item.drafts.max_tokens for item in decodes)
        num_running = len(self.running)
        newcomers = list[WorkItem]()
        may_admit = self.num_preemptions == num_preemptions  # otherwise there are too few blocks
        if may_admit and self.waiting.is_contended:
            # Short prompts of other tenants do not wait for a long one, which gets the other half.
            newcomers += self._admit_waiting(max_prompt_tokens // 2, is_alone=False, must_fit=True)
            max_prompt_tokens -= sum(
                item.sequence.num_to_encode + item.end - item.start for item in newcomers
            )
        # Usually all running sequences decode and none waits.
        has_prompts = len(decodes) < num_running
        prompts = list(self._continue_prompts(max_prompt_tokens, num_running)) if has_prompts else []
        if may_admit and len(self.waiting):
            budget = max_prompt_tokens - sum(item.end - item.start for item in prompts)
            newcomers += self._admit_waiting(budget, is_alone=not prompts and not newcomers)
        return self._send(decodes, prompts, newcomers) if decodes or prompts or newcomers else None

    def apply_answer(self, step: Step, num_proposed: int = 0) -> None:
        """Apply the answer to the oldest step in flight: its tokens are now in the cache. `num_proposed` is
        the number of drafts that the shards proposed."""
        assert next(iter(self._in_flight), None) is step, "steps are answered in order"
        self._in_flight.popleft()
        self.num_drafts += num_proposed
        pool = self.pool
        block_size = pool.block_size
        last_steps = self._last_step
        for sequence, _, _, end, _, opens, _, drafts, state_save in step.work:
            if drafts is not NO_DRAFTS and drafts.max_tokens:
                sequence.is_speculating = False
            if last_steps.get(sequence) is step:
                del last_steps[sequence]
            if sequence.row is not None:  # a preempted sequence is not admitted again before its last answer
                sequence.num_computed = end
                if end // block_size > sequence.num_published:
                    publish_computed(pool, sequence)
                if opens:
                    publish_encoded(pool, sequence)
            if state_save is not None:
                publish_state(pool, sequence, end, state_save)
        for blocks in step.blocks_to_release:
            self._num_blocks_owed -= len(blocks)
            self.pool.release(blocks)

    def append_token(self, sequence: Sequence, token_id: int) -> None:
        """Append a sampled token, after apply_answer, even if the sequence has been preempted since the
        step."""
        if sequence.num_unanswered:
            sequence.num_unanswered -= 1
        else:  # a step yields one token, and one more for each accepted draft
            self.num_accepted_drafts += 1
            accept_draft(self.pool, sequence)
        sequence.token_ids.append(token_id)
        if self.waiting.is_contended:
            self.waiting.count_tokens(sequence, 1)
        if sequence.num_fatal_steps or self._crash_suspects.queue:
            self._crash_suspects.clear(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Remove a sequence in any state. Its unanswered tokens are ignored."""
        self._crash_suspects.clear(sequence)
        is_running = sequence in self.running
        if is_running:
            del self.running[sequence]
            self._drop(sequence)
        self.waiting.end(sequence, is_waiting=not is_running)

    def abandon_steps(self) -> None:
        """Free everything that waits for answers, because no answer will arrive and no step will be sent."""
        while self._in_flight:
            self.apply_answer(self._in_flight[0])

    def reset(self, pool: BlockPool) -> Sequence | None:
        """Put all sequences back into the queue with their tokens, because the shards have lost their state.
        Return the sequence that kills the shards and must not be tried again, if it is known."""
        suspects = [work.sequence for work in self._in_flight[0].work] if self._in_flight else []
        live = {*self.running, *self.waiting}
        culprit = self._crash_suspects.record_crash([suspect for suspect in suspects if suspect in live])
        for step in self._in_flight:
            for work in step.work:
                work.sequence.num_unanswered = 0
                work.sequence.is_speculating = False
        self.pool = pool
        self._in_flight.clear()
        self._last_step.clear()
        self._num_blocks_owed = 0
        for sequence in reversed(self.running):
            self.rows.close(reset_progress(sequence))
            self.waiting.put_back(sequence)
        self.rows.take_closed()
        self.running.clear()
        return culprit

    def _try_alone(self, suspect: Sequence, budget: int) -> Step | None:
        """Return a step of only the suspect. Preempt other sequences if there are too few blocks."""
        if suspect in self.running:
            end = self._find_end(suspect, budget)
            return self._send([], [self._plan(suspect, end, [])], [])
        while not self.rows.num_free or (work := self._admit(suspect, budget, is_alone=True)) is None:
            self._preempt(next(reversed(self.running)))
        return self._send([], [], [work])

    def _continue_decoding(self, max_drafts: int) -> Iterator[WorkItem]:
        # Drafts must not take the capacity of sequences that could sample instead.
        max_drafts = min(max_drafts, self.rows.num_free - len(self.waiting))
        proposer = self.proposer
        if proposer is not None and not proposer.begin(len(self.running), max_drafts):
            proposer = None
        running = self.running
        block_size = self.pool.block_size
        for sequence in list(running):
            num_tokens = len(sequence.token_ids) + sequence.num_unanswered
            if num_tokens - sequence.num_scheduled != 1 or num_tokens >= sequence.max_tokens:
                continue
            if sequence not in running or sequence.is_speculating:
                continue  # its number of tokens is unknown until its drafts are answered
            drafts = NO_DRAFTS
            max_tokens = num_tokens
            if proposer is not None:
                drafts = self._propose(sequence, proposer)
                if sequence.num_unanswered and (drafts.token_ids or drafts.waits):
                    continue  # router's drafts follow its last token, which is unknown
                max_tokens += drafts.max_tokens
            new_blocks: AnySequence[int] = ()
            if max_tokens > len(sequence.block_table) * block_size:
                if (blocks := self._find_blocks(sequence, max_tokens)) is None:
                    continue
                new_blocks = blocks
                sequence.block_table += blocks
            yield self._plan(sequence, num_tokens, new_blocks, drafts=drafts)

    def _propose(self, sequence: Sequence, proposer: Proposer) -> Drafts:
        max_drafts = count_allowed_drafts(self.pool, sequence, len(self.running), self._rope_switch_len)
        return proposer.propose(sequence, max_drafts)

    def _continue_prompts(self, budget: int, num_running: int) -> Iterator[WorkItem]:
        """Continue partly computed prompts, which took their blocks at admission. The first `num_running`
        sequences were admitted in earlier steps."""
        for sequence in islice(self.running, num_running):
            if budget <= 0:
                return
            if sequence.num_pending > 1:
                end = self._find_end(sequence, budget)
                budget -= end - sequence.num_scheduled
                yield self._plan(sequence, end, [])

    def _admit_waiting(self, budget: int, is_alone: bool, must_fit: bool = False) -> Iterator[WorkItem]:
        """Admit waiting sequences in the queue's order. A sequence that does not fit blocks those behind it,
        so that none starves. A sequence that waits for a sibling blocks none and keeps its place. With
        `must_fit`, only sequences are admitted whose prompt can be computed within the budget."""
        waiting = self.waiting
        must_wait = partial(waits_for_sibling, self.pool)
        while budget > 0 and self.rows.num_free and (sequence := waiting.next(must_wait)) is not None:
            work = self._admit(sequence, budget, is_alone, must_fit)
            if work is None:
                return
            is_alone = False
            budget -= sequence.num_to_encode + work.end - work.start
            yield work

    def _admit(
        self, sequence: Sequence, budget: int, is_alone: bool, must_fit: bool = False
    ) -> WorkItem | None:
        """Admit a waiting sequence, or return None if it cannot begin now. Encoder input is computed as a
        whole, and may exceed the budget only if `is_alone`, that is, if the step has no other prompt work."""
        if sequence in self._last_step:
            return None
        sequence.is_long = 0 < self._rope_switch_len < len(sequence.token_ids)
        if self.proposer is not None:
            sequence.is_followed = self.proposer.follows(sequence, len(self.running) + 1)
        cached = find_cached(self.pool, sequence)
        if cached.num_to_encode >= budget and not is_alone:
            return None
        num_cached = len(cached.blocks) * self.pool.block_size
        if must_fit and cached.num_to_encode + sequence.num_tokens - num_cached > budget:
            return None
        if not self._take_blocks_and_row(sequence, cached):
            return None
        self.waiting.take(sequence)
        self.running[sequence] = None
        max_tokens = max(budget - cached.num_to_encode, 1)
        end = self._find_end(sequence, max_tokens)
        return self._plan(sequence, end, list(sequence.block_table), opens=True)

    def _take_blocks_and_row(self, sequence: Sequence, cached: Cached) -> bool:
        # The last token is never computed.
        num_tokens = sequence.max_tokens - 1 if self._reserves_output else len(sequence.token_ids)
        if not take_blocks(self.pool, sequence, cached, num_tokens):
            self.num_deferred += 1
            return False
        num_inputs = len(sequence.encoder_token_ids)
        self.num_cache_queries += len(sequence.token_ids) + num_inputs
        self.num_cache_hits += sequence.num_scheduled + num_inputs - sequence.num_to_encode
        sequence.row = self.rows.take()
        return True

    def _plan(
        self,
        sequence: Sequence,
        end: int,
        new_blocks: AnySequence[int],
        opens: bool = False,
        drafts: Drafts = NO_DRAFTS,
    ) -> WorkItem:
        assert sequence.row is not None
        start = sequence.num_scheduled
        samples = end == len(sequence.token_ids) + sequence.num_unanswered
        sequence.num_scheduled = end
        sequence.num_unanswered += samples
        sequence.is_speculating = drafts is not NO_DRAFTS and drafts.max_tokens > 0
        state_save = None
        if (states := self.pool.states) is not None and states.takes_snapshot(
            sequence, end, self.pool.block_size
        ):
            state_save = states.take()
        return WorkItem(sequence, sequence.row, start, end, samples, opens, new_blocks, drafts, state_save)

    def _find_end(self, sequence: Sequence, max_tokens: int) -> int:
        """Return the end of work on a sequence that may compute that many tokens."""
        end = min(sequence.num_tokens, sequence.num_scheduled + max_tokens)
        states = self.pool.states
        return end if states is None else states.cut(sequence, end, self.pool.block_size)

    def _send(self, decodes: list[WorkItem], prompts: list[WorkItem], newcomers: list[WorkItem]) -> Step:
        may_draft = self.proposer is not None
        work = [*decodes, *prompts, *newcomers]
        step = Step(
            self._num_steps,
            work,
            num_decodes=len(decodes),
            num_drafts=sum(len(item.drafts.token_ids) for item in decodes) if may_draft else 0,
            max_proposed=sum(item.drafts.max_proposed for item in decodes) if may_draft else 0,
            num_encoder_tokens=sum(item.sequence.num_to_encode for item in newcomers),
            joins=0 < len(newcomers) < len(self.running),
            closed_rows=self.rows.take_closed(),
            num_followed=sum(item.sequence.is_followed for item in work) if may_draft else 0,
        )
        self._num_steps += 1
        self.num_drafts += step.num_drafts
        self._in_flight.append(step)
        self._last_step.update(dict.fromkeys([item.sequence for item in step.work], step))
        return step

    def _find_blocks(self, sequence: Sequence, num_tokens: int) -> list[int] | None:
        """Return additional blocks for that many tokens of a sequence. Preempt the youngest sequences if
        necessary. Return None if there are not enough blocks in this step."""
        num_blocks = self.pool.blocks_for(num_tokens) - len(sequence.block_table)
        while (blocks := self.pool.allocate([], num_blocks)) is None:
            if self._num_blocks_owed >= num_blocks - self.pool.num_free:
                return None  # answers in flight will free them
            victim = next(reversed(self.running))
            self._preempt(victim)
            if victim is sequence:
                return None
        return blocks

    def _preempt(self, sequence: Sequence) -> None:
        self._put_back(sequence)
        self.num_preemptions += 1

    def _put_back_outgrown(self) -> None:
        """Put back short sequences whose next token makes them long."""
        for sequence in reversed(list(self.running)):  # reversed, so that the queue keeps their order
            is_past = sequence.num_tokens > self._rope_switch_len
            if is_past and not sequence.is_long and not sequence.reached_limit:
                self._put_back(sequence)

    def _put_back(self, sequence: Sequence) -> None:
        """Put a sequence back at the head of the queue. Its unanswered tokens remain valid."""
        del self.running[sequence]
        self._drop(sequence)
        self.waiting.put_back(sequence)

    def _drop(self, sequence: Sequence) -> None:
        """Free the row now, and the blocks when the last step that uses them has been answered."""
        blocks = [*sequence.cross_blocks, *sequence.block_table]
        last_step = self._last_step.get(sequence)
        if last_step is None:
            self.pool.release(blocks)
        else:
            last_step.blocks_to_release.append(blocks)
            self._num_blocks_owed += len(blocks)
        if sequence.state_slot is not None:
            assert self.pool.states is not None, "the slot is one of the pool's"
            self.pool.states.release(sequence.state_slot)
        self.rows.close(reset_progress(sequence))


def count_allowed_drafts(pool: BlockPool, sequence: Sequence, num_running: int, rope_switch_len: int) -> int:
    """Return the maximum number of drafts for a decoding sequence: within its length limits, and within its
    own blocks and the free blocks, of which one is reserved for each running sequence."""
    limit = sequence.max_tokens - 1  # the last token is never computed
    if rope_switch_len and not sequence.is_long:
        limit = min(limit, rope_switch_len)
    num_blocks = max(len(sequence.block_table), pool.blocks_for(sequence.num_tokens))
    num_blocks += max(pool.num_free - num_running, 0)
    return min(limit, num_blocks * pool.block_size) - sequence.num_tokens
