"""Runs the engine alone as a contender: the router's scheduler and the shard's model runner in one process,
without gRPC, clients or text; a worker process whose arguments are the model's directory, the type of its
weights and the number of tokens in its cache."""

import gc
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bench import worker
from bench.steps import load_runner
from tgis.config.processes import RouterConfig
from tgis.router.scheduling.block_pool import BlockPool
from tgis.router.scheduling.scheduler import Scheduler
from tgis.router.scheduling.token_budget import TokenBudget
from tgis.router.sequence import Sequence, Stopping
from tgis.router.shards.codec import decode_answer, encode_step
from tgis.shard.runner.interface import ModelRunner


class EngineAlone:
    """Contender that schedules like a service with the same options when all requests arrive at once."""

    def __init__(self, runner: ModelRunner):
        self._runner = runner
        # It is kept between measurements, as in a service, because it learns how long steps take.
        self._budget = TokenBudget(RouterConfig.max_step_tokens, RouterConfig.decode_step_ms / 1000)

    def answer(self, question: dict[str, Any]) -> dict[str, float]:
        """Return the seconds until all sequences have all of their tokens."""
        self._runner.reset()
        info = self._runner.info
        scheduler = Scheduler(BlockPool(info.num_blocks, info.block_size), question["batch"])
        for prompt in self._make_prompts(question):
            scheduler.add(Sequence(prompt, Stopping(question["new_tokens"])))
        start = time.perf_counter()
        while scheduler.waiting or scheduler.running:
            self._take_step(scheduler)
        return {"seconds": time.perf_counter() - start}

    def _make_prompts(self, question: dict[str, Any]) -> Iterator[list[int]]:
        random = np.random.default_rng(question["seed"])
        for _ in range(question["batch"]):
            yield random.integers(2, self._runner.info.vocab_size, question["input_tokens"]).tolist()

    def _take_step(self, scheduler: Scheduler) -> None:
        num_decoding = scheduler.num_decoding
        num_prompts = len(scheduler.waiting) + len(scheduler.running) - num_decoding
        step = scheduler.next_step(self._budget.prompt_tokens(num_decoding, num_prompts))
        assert step is not None, "nothing is in flight that could be waited for"
        answer = decode_answer(step, self._runner.launch(encode_step(step)).answer())
        scheduler.apply_answer(step)
        self._budget.observe(step.num_tokens, answer.forward_s)
        for sampled in answer.sampled:
            scheduler.append_token(sampled.sequence, sampled.token.token_id)
            if sampled.sequence.reached_limit:
                scheduler.finish(sampled.sequence)


def main() -> None:
    directory, dtype, cache_tokens = sys.argv[1:]
    alone = EngineAlone(load_runner(Path(directory), dtype, int(cache_tokens)))
    gc.freeze()
    gc.disable()
    worker.serve(alone.answer)


if __name__ == "__main__":
    main()
