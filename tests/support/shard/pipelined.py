"""Scheduler and model runner with steps in flight, cancelled sequences and lost shards."""

from collections import deque
from dataclasses import dataclass, field

from tests.support.shard.scheduled import Service
from tgis.pb import shard_pb2 as pb
from tgis.router.scheduling.step import Step
from tgis.router.sequence import Sequence
from tgis.router.shards.codec import decode_answer, encode_step
from tgis.shard.runner.interface import Pending

MAX_IDLE_TURNS = 2000


@dataclass
class PipelinedService(Service):
    """Service that sends up to `depth` steps before the answer to the first. In each turn, a sequence is
    cancelled with the probability `cancelling`, and the shard is lost with the probability `losing`."""

    depth: int = 2
    cancelling: float = 0.0
    losing: float = 0.0
    ended: set[Sequence] = field(default_factory=set)
    cancelled: set[Sequence] = field(default_factory=set)
    pending: deque[tuple[Step, Pending]] = field(default_factory=deque)

    def run_all(self, sequences: list[Sequence]) -> None:
        waiting, num_idle = list(sequences), 0
        self.logprobs |= {sequence: [] for sequence in sequences}
        scheduler, rng = self.scheduler, self.random
        while waiting or scheduler.running or scheduler.waiting or self.pending:
            while waiting and (rng.random() < 0.5 or not (scheduler.running or scheduler.waiting)):
                scheduler.add(waiting.pop(0))
            self._cancel()
            has_sent = len(self.pending) < self.depth and self._send()
            if self.pending and (not has_sent or rng.random() < 0.4):
                self._receive()
                num_idle = 0
            num_idle += not has_sent
            assert num_idle < MAX_IDLE_TURNS, "the scheduler is stuck"

    def _cancel(self) -> None:
        live = [*self.scheduler.running, *self.scheduler.waiting]
        if live and self.random.random() < self.cancelling:
            sequence = self.random.choice(live)
            self.cancelled.add(sequence)
            self._end(sequence)

    def _end(self, sequence: Sequence) -> None:
        self.ended.add(sequence)
        self.scheduler.finish(sequence)

    def _send(self) -> bool:
        step = self.scheduler.next_step(self.max_prompt_tokens or self.random.randint(1, 40))
        if step is not None:
            request = pb.StepRequest.FromString(encode_step(step).SerializeToString())
            self.pending.append((step, self.runner.launch(request)))
        return step is not None

    def _receive(self) -> None:
        if self.random.random() < self.losing:
            for _, pending in self.pending:
                pending.answer()
            self.pending.clear()
            self.lose()
            return
        step, pending = self.pending.popleft()
        answer = decode_answer(step, pending.answer())
        self.scheduler.apply_answer(step, answer.num_proposed)
        for sampled in answer.sampled:
            sequence = sampled.sequence
            if sequence not in self.ended:
                self.scheduler.append_token(sequence, sampled.token.token_id)
                self.logprobs[sequence].append(sampled.token.logprob)
                if sampled.ended:
                    self._end(sequence)
