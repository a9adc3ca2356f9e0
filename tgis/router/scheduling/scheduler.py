"""Scheduler: decides what the shards compute next. It has no prefill and decode phases: a sequence has tokens
that are not computed yet, and every step computes some of them. Steps may be sent before earlier ones are
answered."""

from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as AnySequence

from tgis.router.scheduling.block_pool import BlockPool
from tgis.router.scheduling.crash_suspects import CrashSuspects
from tgis.router.scheduling.free_rows import FreeRows
from tgis.router.scheduling.prefix_cache import (
    Cached,
    accept_draft,
    find_cached,
    publish_computed,
    publish_encoded,
    reset_progress,
    take_blocks,
    waits_for_sibling,
)
from tgis.router.scheduling.proposers.interface import Proposer
from tgis.router.scheduling.step import NO_DRAFTS, Drafts, Step, WorkItem
from tgis.router.sequence import Sequence


class Scheduler:
    """Owner of the waiting and the running sequences, the rows and the blocks.

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
        `proposer`, nothing is speculated. With `reserves_output`, a sequence takes the blocks of its full
        length when it begins, so that it is never preempted, unless it runs beside a crash suspect."""
        self.pool, self._proposer = pool, proposer
        self._rope_switch_len, self._reserves_output = rope_switch_len, reserves_output
        self.waiting: deque[Sequence] = deque()
        self.running: dict[Sequence, None] = {}  # oldest first
        self.num_preemptions = 0
        self.num_deferred = 0  # times that the first waiting sequence found too few free blocks
        self.num_cache_queries = self.num_cache_hits = 0  # tokens looked up in the prefix cache, and found
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
        """Append a sequence to the queue. A sequence of full length must fit into the pool."""
        self.waiting.append(sequence)

    def next_step(self, max_prompt_tokens: int) -> Step | None:
        """Return the next step, or None if nothing can be computed before a further answer or arrival. Every
        sequence with a single pending token takes part. Longer ones share `max_prompt_tokens`, oldest first;
        drafts take up to half of it. Encoder input counts too, and may exceed it as the only prompt work."""
        if self._rope_switch_len:
            self._put_back_outgrown()
        if (suspect := self._crash_suspects.next) is not None:
            return None if self._in_flight else self._try_alone(suspect, max_prompt_tokens)
        num_preemptions = self.num_preemptions
        decodes = list(self._continue_decoding(max_prompt_tokens // 2))
        if self._proposer is not None:
            max_prompt_tokens -= sum(item.drafts.most for item in decodes)
        prompts = list(self._continue_prompts(max_prompt_tokens))
        newcomers: list[WorkItem] = []
        if self.num_preemptions == num_preemptions:  # else blocks are short: no newcomers
            budget = max_prompt_tokens - sum(item.end - item.start for item in prompts)
            newcomers += self._admit_waiting(budget, is_alone=not prompts)
        return self._send(decodes, prompts, newcomers) if decodes or prompts or newcomers else None

    def apply_answer(self, step: Step, num_proposed: int = 0) -> None:
        """Apply the answer to the oldest step in flight: its tokens are now in the cache. `num_proposed` is
        the number of drafts that the shards proposed themselves."""
        assert next(iter(self._in_flight), None) is step, "steps are answered in order"
        self._in_flight.popleft()
        self.num_drafts += num_proposed
        pool, block_size, last_steps = self.pool, self.pool.block_size, self._last_step
        for sequence, _, _, end, _, opens, _, drafts in step.work:
            if drafts is not NO_DRAFTS and drafts.most:
                sequence.is_speculating = False
            if last_steps.get(sequence) is step:
                del last_steps[sequence]
            if sequence.row is not None:  # a preempted one is not admitted again before its last answer
                sequence.num_computed = end
                if end // block_size > sequence.num_published:
                    publish_computed(pool, sequence)
                if opens:
                    publish_encoded(pool, sequence)
        for blocks in step.blocks_to_release:
            self._num_blocks_owed -= len(blocks)
            self.pool.release(blocks)

    def append_token(self, sequence: Sequence, token_id: int) -> None:
        """Append a sampled token, after apply_answer, also to a sequence that was preempted meanwhile."""
        if sequence.num_unanswered:
            sequence.num_unanswered -= 1
        else:  # a step brings one token, and a further one for each accepted draft
            self.num_accepted_drafts += 1
            accept_draft(self.pool, sequence)
        sequence.token_ids.append(token_id)
        if sequence.num_fatal_steps or self._crash_suspects.queue:
            self._crash_suspects.clear(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Remove a sequence in any state. Its unanswered tokens are ignored."""
        self._crash_suspects.clear(sequence)
        if sequence in self.running:
            del self.running[sequence]
            self._drop(sequence)
        else:
            self.waiting.remove(sequence)

    def abandon_steps(self) -> None:
        """Free everything that waits for answers: none will come, and no step will be sent any more."""
        while self._in_flight:
            self.apply_answer(self._in_flight[0])

    def reset(self, pool: BlockPool) -> Sequence | None:
        """Put all sequences back to waiting with their tokens, because the shards have lost everything.
        Return the one that must not be tried again because it kills the shards, if any."""
        suspects = [work.sequence for work in self._in_flight[0].work] if self._in_flight else []
        live = {*self.running, *self.waiting}
        culprit = self._crash_suspects.record_crash([suspect for suspect in suspects if suspect in live])
        for step in self._in_flight:
            for work in step.work:
                work.sequence.num_unanswered, work.sequence.is_speculating = 0, False
        self.pool = pool
        self._in_flight.clear()
        self._last_step.clear()
        self._num_blocks_owed = 0
        for sequence in reversed(self.running):
            self.rows.close(reset_progress(sequence))
            self.waiting.appendleft(sequence)
        self.rows.take_closed()
        self.running.clear()
        return culprit

    def _try_alone(self, suspect: Sequence, budget: int) -> Step | None:
        """Return a step of the suspect alone. Other sequences are preempted if there are too few blocks."""
        if suspect in self.running:
            end = min(suspect.num_tokens, suspect.num_scheduled + budget)
            return self._send([], [self._plan(suspect, end, [])], [])
        while not self.rows.num_free or (work := self._admit(suspect, budget, is_alone=True)) is None:
            self._preempt(next(reversed(self.running)))
        return self._send([], [], [work])

    def _continue_decoding(self, max_drafts: int) -> Iterator[WorkItem]:
        # Drafts take the place of sequences that could sample.
        max_drafts = min(max_drafts, self.rows.num_free - len(self.waiting))
        proposer = self._proposer
        if proposer is not None and not proposer.begin(len(self.running), max_drafts):
            proposer = None
        running, block_size = self.running, self.pool.block_size
        for sequence in list(running):
            num_tokens = len(sequence.token_ids) + sequence.num_unanswered
            if num_tokens - sequence.num_scheduled != 1 or num_tokens >= sequence.max_tokens:
                continue
            if sequence not in running or sequence.is_speculating:
                continue  # how many tokens it has is known once its drafts are answered
            drafts, most_tokens = NO_DRAFTS, num_tokens
            if proposer is not None:
                drafts = self._propose(sequence, proposer)
                if drafts.token_ids and sequence.num_unanswered:
                    continue  # they follow its last token
                most_tokens += drafts.most
            new_blocks: AnySequence[int] = ()
            if most_tokens > len(sequence.block_table) * block_size:
                if (found := self._find_blocks(sequence, most_tokens)) is None:
                    continue
                new_blocks = found
                sequence.block_table += found
            yield self._plan(sequence, num_tokens, new_blocks, drafts=drafts)

    def _propose(self, sequence: Sequence, proposer: Proposer) -> Drafts:
        num_running = len(self.running)
        return proposer.propose(sequence, find_room(self.pool, sequence, num_running, self._rope_switch_len))

    def _continue_prompts(self, budget: int) -> Iterator[WorkItem]:
        """Continue prompts that are computed in part. They took their blocks at admission."""
        for sequence in self.running:
            if budget <= 0:
                return
            if sequence.num_pending > 1:
                end = min(sequence.num_tokens, sequence.num_scheduled + budget)
                budget -= end - sequence.num_scheduled
                yield self._plan(sequence, end, [])

    def _admit_waiting(self, budget: int, is_alone: bool) -> Iterator[WorkItem]:
        """Admit waiting sequences in order of arrival; one that does not fit blocks those behind it, so that
        none starves. One that waits for a sibling blocks none, and keeps its place."""
        place = 0
        while place < len(self.waiting) and budget > 0 and self.rows.num_free:
            sequence = self.waiting[place]
            if waits_for_sibling(self.pool, sequence):
                place += 1
                continue
            work = self._admit(sequence, budget, is_alone)
            if work is None:
                return
            is_alone = False
            budget -= sequence.num_to_encode + work.end - work.start
            yield work

    def _admit(self, sequence: Sequence, budget: int, is_alone: bool) -> WorkItem | None:
        """Admit a waiting sequence, or return None if it cannot begin now. An encoder's input is computed
        whole, and may exceed the budget only if `is_alone`, that is, if the step has no other prompt work."""
        if sequence in self._last_step:
            return None
        sequence.is_long = 0 < self._rope_switch_len < len(sequence.token_ids)
        cached = find_cached(self.pool, sequence)
        if cached.num_to_encode >= budget and not is_alone:
            return None
        if not self._take_blocks_and_row(sequence, cached):
            return None
        self.waiting.remove(sequence)
        self.running[sequence] = None
        most = max(budget - cached.num_to_encode, 1)
        end = min(sequence.num_tokens, sequence.num_scheduled + most)
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
        start, samples = sequence.num_scheduled, end == len(sequence.token_ids) + sequence.num_unanswered
        sequence.num_scheduled = end
        sequence.num_unanswered += samples
        sequence.is_speculating = drafts is not NO_DRAFTS and drafts.most > 0
        return WorkItem(sequence, sequence.row, start, end, samples, opens, new_blocks, drafts)

    def _send(self, decodes: list[WorkItem], prompts: list[WorkItem], newcomers: list[WorkItem]) -> Step:
        may_draft = self._proposer is not None
        step = Step(
            self._num_steps,
            [*decodes, *prompts, *newcomers],
            num_decodes=len(decodes),
            num_drafts=sum(len(item.drafts.token_ids) for item in decodes) if may_draft else 0,
            max_proposed=sum(item.drafts.max_proposed for item in decodes) if may_draft else 0,
            num_encoder_tokens=sum(item.sequence.num_to_encode for item in newcomers),
            joins=0 < len(newcomers) < len(self.running),
            closed_rows=self.rows.take_closed(),
        )
        self._num_steps += 1
        self.num_drafts += step.num_drafts
        self._in_flight.append(step)
        self._last_step.update(dict.fromkeys([item.sequence for item in step.work], step))
        return step

    def _find_blocks(self, sequence: Sequence, num_tokens: int) -> list[int] | None:
        """Return free blocks for what exceeds the sequence's own, preempting the youngest if need be; None if
        this step cannot have enough."""
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
        for sequence in reversed(list(self.running)):  # so that they wait in the order in which they ran
            is_past = sequence.num_tokens > self._rope_switch_len
            if is_past and not sequence.is_long and not sequence.reached_limit:
                self._put_back(sequence)

    def _put_back(self, sequence: Sequence) -> None:
        """Put a sequence back at the head of the queue. Its unanswered tokens still count."""
        del self.running[sequence]
        self._drop(sequence)
        self.waiting.appendleft(sequence)

    def _drop(self, sequence: Sequence) -> None:
        """Free the row, and the blocks once the last step that names them has been answered."""
        blocks = [*sequence.cross_blocks, *sequence.block_table]
        last_step = self._last_step.get(sequence)
        if last_step is None:
            self.pool.release(blocks)
        else:
            last_step.blocks_to_release.append(blocks)
            self._num_blocks_owed += len(blocks)
        self.rows.close(reset_progress(sequence))


def find_room(pool: BlockPool, sequence: Sequence, num_running: int, rope_switch_len: int) -> int:
    """Return the most drafts within the limits of a decoding sequence, and within blocks that it has or that
    are free beyond one for each running sequence, so that no other lacks blocks."""
    limit = sequence.max_tokens - 1  # the last token is never computed
    if rope_switch_len and not sequence.is_long:
        limit = min(limit, rope_switch_len)
    num_blocks = max(len(sequence.block_table), pool.blocks_for(sequence.num_tokens))
    num_blocks += max(pool.num_free - num_running, 0)
    return min(limit, num_blocks * pool.block_size) - sequence.num_tokens
