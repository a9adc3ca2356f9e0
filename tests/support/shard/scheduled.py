"""Scheduler of the router in front of a model runner, without the processes between them."""

import random
from dataclasses import dataclass, field

from tgis.pb import shard_pb2 as pb
from tgis.router.scheduling.block_pool import BlockPool
from tgis.router.scheduling.proposers.interface import Proposer
from tgis.router.scheduling.scheduler import Scheduler
from tgis.router.scheduling.state_pool import StatePool
from tgis.router.sequence import CallAdapters, Details, Sampling, Sequence, Stopping
from tgis.router.shards.codec import decode_answer, encode_step
from tgis.shard.runner.interface import ModelRunner

PAD = 0
NO_ADAPTERS = CallAdapters()
DETAILS = Details(generated_tokens=True, logprobs=True)


def greedy(token_ids: list[int], max_new_tokens: int, adapters: CallAdapters = NO_ADAPTERS) -> Sequence:
    padded = [PAD] * adapters.num_decoder_tokens + token_ids
    return Sequence(padded, Stopping(max_new_tokens), Sampling(greedy=True), DETAILS, adapters=adapters)


Result = tuple[list[int], list[float]]
"""Tokens and log-probabilities of a sequence."""


def draw_ids(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 99) for _ in range(count)]


@dataclass
class Service:
    """Scheduler and shard. Steps compute at most `max_prompt_tokens` of prompts; 0: a random number."""

    runner: ModelRunner
    num_blocks: int
    num_states: int
    interval: int
    max_prompt_tokens: int = 0
    seed: int = 0
    proposer: Proposer | None = None
    logprobs: dict[Sequence, list[float]] = field(default_factory=dict)
    num_computed: int = 0
    """Number of tokens computed so far."""

    def __post_init__(self) -> None:
        info = self.runner.info
        assert self.num_blocks <= info.num_blocks
        assert self.num_states <= info.num_states
        states = StatePool(self.num_states, self.interval)
        pool = BlockPool(self.num_blocks, info.block_size, states=states if self.num_states else None)
        self.scheduler = Scheduler(pool, 8, proposer=self.proposer)
        self.random = random.Random(self.seed)

    def run(self, sequences: list[Sequence], loss: float = 0.0) -> None:
        """Compute the sequences to their ends. With the probability `loss`, the shard is lost in a step."""
        waiting = list(sequences)
        self.logprobs |= {sequence: [] for sequence in sequences}
        while waiting or self.scheduler.running or self.scheduler.waiting:
            if waiting and (not self.scheduler.running or self.random.random() < 0.6):
                self.scheduler.add(waiting.pop(0))
            budget = self.max_prompt_tokens or self.random.randint(1, 40)
            step = self.scheduler.next_step(budget)
            assert step is not None, "nothing is in flight"
            request = pb.StepRequest.FromString(encode_step(step).SerializeToString())
            answer = decode_answer(step, self.runner.launch(request).answer())
            if self.random.random() < loss:
                self.lose()
                continue
            self.num_computed += answer.num_tokens
            self.scheduler.apply_answer(step, answer.num_proposed)
            assert not answer.failed
            for sampled in answer.sampled:
                self.scheduler.append_token(sampled.sequence, sampled.token.token_id)
                self.logprobs[sampled.sequence].append(sampled.token.logprob)
                if sampled.ended:
                    self.scheduler.finish(sampled.sequence)

    def lose(self) -> None:
        """Lose the shard's rows, blocks and states."""
        self.runner.reset()
        pool = self.scheduler.pool
        for sequence in self.scheduler.running:
            sequence.num_fatal_steps = 0  # so that none is blamed
        self.scheduler.reset(pool.renew(pool.num_blocks, pool.block_size))


def results(service: Service, sequences: list[Sequence]) -> list[Result]:
    return [(each.token_ids, service.logprobs[each]) for each in sequences]


def compute_alone(
    runner: ModelRunner, token_ids: list[int], num_tokens: int, adapters: CallAdapters = NO_ADAPTERS
) -> Result:
    """Return the result of a sequence whose prompt is one step, in a new cache."""
    runner.reset()
    service = Service(runner, 60, 1, 1 << 20, max_prompt_tokens=1 << 10)
    sequence = greedy(token_ids, num_tokens, adapters)
    service.run([sequence])
    return results(service, [sequence])[0]


def check_graphs_of_steps(runner: ModelRunner, interval: int) -> None:
    """Check that a captured step reads the slots of each later step."""
    prompts = [draw_ids(i, 6 + i) for i in range(3)]
    expected = [compute_alone(runner, prompt, 9) for prompt in prompts]
    runner.reset()
    service = Service(runner, 60, 8, interval, seed=3)
    sequences = [greedy(prompt, 9) for prompt in prompts]
    service.run(sequences)
    assert results(service, sequences) == expected
    assert runner.forward.find_graph(3) is not None  # type: ignore[attr-defined]
