"""What the router itself does for a step, with shards that answer at once: takes in the answer, turns tokens
to text, looks for ends, plans the next step and encodes it. Delivery to clients is not in it."""

import asyncio
import gc
import statistics
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any, cast

import numpy as np

from tgis.net.framing import frame
from tgis.pb import shard_pb2 as pb
from tgis.router.adapters.residency import AdapterResidency
from tgis.router.engine.engine import Engine
from tgis.router.metrics.metrics import MetricLimits, Metrics
from tgis.router.scheduling.block_pool import BlockPool
from tgis.router.scheduling.step import Step
from tgis.router.scheduling.token_budget import TokenBudget
from tgis.router.sequence import Sequence, Stopping
from tgis.router.shards.client import ShardClient
from tgis.router.shards.codec import Answer, decode_answer, encode_step
from tgis.router.text.detokenizer import Vocabulary
from tgis.router.text.stop_sequences import StopSequences, TextStream
from tgis.router.text.tokenizer import Tokenizer

SIZES = (32, 64, 128, 256)  # live sequences
WARM_STEPS, STEPS = 10, 60
PROMPT_TOKENS, BLOCK_SIZE, MAX_STEP_TOKENS = 128, 16, 1 << 20
NEW_TOKENS = WARM_STEPS + STEPS + 2
ENDS = ("###", "\n\nQuestion:")


def run(options: Namespace, model: Path) -> dict[str, Any]:
    """The service has one step in flight while another is prepared; here, one after the other."""
    tokenizer = Tokenizer(model)
    try:
        vocabulary = Vocabulary(tokenizer)
        gc.collect()
        gc.freeze()
        rounds = [
            {size: _time_step(vocabulary, tokenizer, size) for size in SIZES} for _ in range(options.rounds)
        ]
    finally:
        gc.unfreeze()
        tokenizer.close()
    medians = {size: 1e3 * statistics.median(each[size] for each in rounds) for size in SIZES}
    told = ", ".join(f"{ms:.2f} at {size}" for size, ms in medians.items())
    print(f"router's step: {told} ms", file=sys.stderr, flush=True)
    largest, quarter = SIZES[-1], SIZES[-1] // 4
    growth = [each[largest] / each[quarter] / 4 for each in rounds]
    return {
        "figures": {
            "router": {"values": [1e3 * each[largest] for each in rounds], "detail": f"{told} sequences"},
            "router growth": {"values": growth, "detail": "1 is linear"},
        },
        "rounds": rounds,
    }


class InstantShards:
    """Gives every row that is to have a token a random one, and takes the time until it is asked again."""

    def __init__(self, vocab_size: int):
        self._random, self._vocab_size = np.random.default_rng(0), vocab_size
        self._steps, self._began = asyncio.Queue[Step](), 0.0
        self.times: list[float] = []

    def send(self, step: Step, timeout_s: float) -> None:
        frame(encode_step(step, timeout_s))
        self._steps.put_nowait(step)

    async def receive(self) -> Answer:
        if self._began:
            self.times.append(time.perf_counter() - self._began)
        self._began = 0.0
        # This does not wait while there is a step: whoever waits for tokens takes all of them in the end.
        step = await self._steps.get()
        body = self._answer(step)
        self._began = time.perf_counter()
        return decode_answer(step, pb.StepResponse.FromString(body))

    def _answer(self, step: Step) -> bytes:
        rows = [work.row for work in step.work if work.samples]
        response = pb.StepResponse(
            step_id=step.step_id,
            rows=np.array(rows, "<i4").tobytes(),
            token_ids=self._random.integers(2, self._vocab_size, len(rows)).astype("<i4").tobytes(),
            ended=bytes(len(rows)),
        )
        return response.SerializeToString()


def _time_step(vocabulary: Vocabulary, tokenizer: Tokenizer, size: int) -> float:
    """Seconds, the median of many steps in which all sequences get a token."""
    shards = InstantShards(tokenizer.fast.get_vocab_size())
    asyncio.run(_generate(shards, vocabulary, size))
    # The first steps have prompts, the last ones are without those that have ended.
    return statistics.median(shards.times[WARM_STEPS : WARM_STEPS + STEPS])


async def _generate(shards: InstantShards, vocabulary: Vocabulary, size: int) -> None:
    metrics = Metrics(MetricLimits(PROMPT_TOKENS + NEW_TOKENS, NEW_TOKENS, size))
    engine = Engine(
        AdapterResidency(cast(ShardClient, shards), metrics),
        BlockPool(2 * size * (PROMPT_TOKENS + NEW_TOKENS) // BLOCK_SIZE, BLOCK_SIZE),
        metrics,
        max_batch_size=size,
        rope_switch_len=0,
        proposer=None,
        reserves_output=False,
        budget=TokenBudget(MAX_STEP_TOKENS, 1.0),
        steps_in_flight=1,
        recovery_timeout=1.0,
        token_timeouts=(None, None),
        on_ready=lambda _: None,
    )
    loop = asyncio.create_task(engine.run())
    await asyncio.gather(*(_consume(engine, vocabulary, index) for index in range(size)))
    loop.cancel()
    await asyncio.gather(loop, return_exceptions=True)


async def _consume(engine: Engine, vocabulary: Vocabulary, index: int) -> None:
    prompt = [2 + index, *range(2, PROMPT_TOKENS + 1)]  # nobody shares another's blocks
    stopping = Stopping(NEW_TOKENS, eos_token_ids=frozenset({1}))
    text = TextStream(vocabulary, StopSequences(ENDS))
    async for _ in engine.open(Sequence(prompt, stopping), text):
        pass
