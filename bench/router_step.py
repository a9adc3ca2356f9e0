"""Measures the router's own work for a step, with shards that reply at once: it reads the results, converts
tokens to text, checks for ends, plans the next step and encodes it. Delivery to clients is not included.

For an engine process, whose router workers convert the text, the messages to the workers are included."""

import asyncio
import gc
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np

from tgis.net.framing import frame, frame_body
from tgis.pb import shard_pb2 as pb
from tgis.router.adapters.registry import AdapterRegistry
from tgis.router.adapters.residency import AdapterResidency
from tgis.router.engine.claims import Claims, ConcurrencyLimit, LocalHandle
from tgis.router.engine.engine import Engine, TimeLimits
from tgis.router.engine.handle import ClaimId, LimitedWork, Progress, SequenceId, SequenceSpec
from tgis.router.metrics.metrics import MetricLimits, Metrics
from tgis.router.remote import messages as wire
from tgis.router.remote.worker_session import WorkerSession
from tgis.router.scheduling.block_pool import BlockPool
from tgis.router.scheduling.scheduler import Scheduler
from tgis.router.scheduling.step import Step
from tgis.router.scheduling.token_budget import TokenBudget
from tgis.router.sequence import Stopping
from tgis.router.shards.client import ShardClient
from tgis.router.shards.codec import StepAnswer, decode_answer, encode_step
from tgis.router.text.detokenizer import Vocabulary
from tgis.router.text.stop_sequences import StopSequences, TextStream
from tgis.router.text.tokenizer import Tokenizer

SIZES, ENGINE_SIZES = (32, 64, 128, 256), (256, 512)  # live sequences
NUM_WORKERS = 3
WARM_STEPS, STEPS = 10, 60
PROMPT_TOKENS, BLOCK_SIZE, MAX_STEP_TOKENS = 128, 16, 1 << 20
NEW_TOKENS = WARM_STEPS + STEPS + 2
ENDS = ("###", "\n\nQuestion:")


class FrontEnds(Protocol):
    """API side that opens the sequences and receives their events."""

    includes_messages: bool
    """True if the messages to the router workers are part of a step."""

    async def generate(self, claims: Claims, size: int) -> None: ...


def run(options: Namespace, model: Path) -> dict[str, Any]:
    """Steps are run one after the other; the service has one step in flight while it prepares another."""
    tokenizer = Tokenizer(model)
    try:
        front_ends, vocab_size = LocalFrontEnds(Vocabulary(tokenizer)), tokenizer.fast.get_vocab_size()
        gc.collect()
        gc.freeze()
        rounds = [
            {size: time_step(front_ends, vocab_size, size) for size in SIZES} for _ in range(options.rounds)
        ]
        engine_rounds = time_engine(options.rounds, vocab_size)
    finally:
        gc.unfreeze()
        tokenizer.close()
    medians = _medians(rounds)
    print(f"router's step: {medians} ms", file=sys.stderr, flush=True)
    largest, quarter = SIZES[-1], SIZES[-1] // 4
    growth = [each[largest] / each[quarter] / 4 for each in rounds]
    router = {"values": [1e3 * each[largest] for each in rounds], "detail": f"{medians} sequences"}
    return {
        "figures": {
            "router": router,
            "router growth": {"values": growth, "detail": "1 is linear"},
            **{f"engine process {size}": _engine_figure(engine_rounds, size) for size in ENGINE_SIZES},
        },
        "rounds": rounds,
        "engine rounds": engine_rounds,
    }


def time_engine(rounds: int, vocab_size: int) -> list[dict[int, float]]:
    """Return the seconds of an engine process's step by the number of sequences, in each round."""
    front_ends = RemoteFrontEnds()
    return [{size: time_step(front_ends, vocab_size, size) for size in ENGINE_SIZES} for _ in range(rounds)]


def _engine_figure(rounds: list[dict[int, float]], size: int) -> dict[str, Any]:
    detail = f"with the messages to {NUM_WORKERS} router workers"
    return {"values": [1e3 * each[size] for each in rounds], "detail": detail}


def _medians(rounds: list[dict[int, float]]) -> str:
    medians = {size: 1e3 * statistics.median(each[size] for each in rounds) for size in rounds[0]}
    return ", ".join(f"{ms:.2f} at {size}" for size, ms in medians.items())


class InstantShards:
    """Fake shard that returns a random token for each row, and measures the time until the next step."""

    def __init__(self, vocab_size: int, includes_messages: bool) -> None:
        self._random, self._vocab_size = np.random.default_rng(0), vocab_size
        self._includes_messages = includes_messages
        self._steps, self._began = asyncio.Queue[Step](), 0.0
        self.times: list[float] = []

    def send(self, step: Step, timeout_s: float) -> None:
        frame(encode_step(step, timeout_s))
        self._steps.put_nowait(step)

    async def receive(self) -> StepAnswer:
        if self._began:
            if self._includes_messages:
                await asyncio.sleep(
                    0
                )  # they are encoded after the step, in the same iteration of the event loop
            self.times.append(time.perf_counter() - self._began)
        self._began = 0.0
        # This does not block during a step: the reader eventually takes all tokens.
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


def time_step(front_ends: FrontEnds, vocab_size: int, size: int) -> float:
    """Return the median seconds of many steps in which all sequences get a token."""
    shards = InstantShards(vocab_size, front_ends.includes_messages)
    asyncio.run(_generate(shards, front_ends, size))
    # The first steps have prompts; the last ones lack the sequences that have ended.
    return statistics.median(shards.times[WARM_STEPS : WARM_STEPS + STEPS])


async def _generate(shards: InstantShards, front_ends: FrontEnds, size: int) -> None:
    metrics = Metrics(MetricLimits(PROMPT_TOKENS + NEW_TOKENS, NEW_TOKENS, size))
    residency = AdapterResidency(cast(ShardClient, shards), metrics)
    pool = BlockPool(2 * size * (PROMPT_TOKENS + NEW_TOKENS) // BLOCK_SIZE, BLOCK_SIZE)
    engine = Engine(
        residency,
        Scheduler(pool, size),
        metrics,
        budget=TokenBudget(MAX_STEP_TOKENS, 1.0),
        steps_in_flight=1,
        time_limits=TimeLimits(recovery_s=1.0),
        on_ready=lambda _: None,
    )
    concurrency = {LimitedWork.GENERATION: ConcurrencyLimit(size)}
    claims = Claims(concurrency, AdapterRegistry(residency, metrics))
    claims.attach(engine, pb.InfoResponse())
    loop = asyncio.create_task(engine.run())
    await front_ends.generate(claims, size)
    loop.cancel()
    await asyncio.gather(loop, return_exceptions=True)


class LocalFrontEnds:
    """API side in the engine's process, including text."""

    includes_messages = False

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary

    async def generate(self, claims: Claims, size: int) -> None:
        handle = LocalHandle(claims)
        await asyncio.gather(*(self._consume(handle, index) for index in range(size)))

    async def _consume(self, handle: LocalHandle, index: int) -> None:
        text = TextStream(self._vocabulary, StopSequences(ENDS))
        sequence_id = handle.open(await handle.acquire(1), _spec(index), text)
        async for _ in handle.events(sequence_id):
            pass


class RemoteFrontEnds:
    """API sides in other processes: the engine's half of their handles."""

    includes_messages = True

    async def generate(self, claims: Claims, size: int) -> None:
        ended, num_left = asyncio.Event(), size

        def send(message: Any) -> None:
            nonlocal num_left
            frame_body(wire.encode(message))
            if isinstance(message, wire.Finished):
                num_left -= 1
                if not num_left:
                    ended.set()

        def send_now(messages: Iterable[Any]) -> None:
            for message in messages:
                send(message)

        sessions = [WorkerSession(claims, send, send_now) for _ in range(NUM_WORKERS)]
        for index in range(size):
            session, claim_id = sessions[index % NUM_WORKERS], ClaimId(index)
            session.take(wire.Acquire(claim_id, LimitedWork.GENERATION, 1))
            session.take(wire.Open(claim_id, SequenceId(index), _spec(index), Progress()))
        await ended.wait()


def _spec(index: int) -> SequenceSpec:
    prompt = (2 + index, *range(2, PROMPT_TOKENS + 1))  # so that no sequence shares another's blocks
    return SequenceSpec(prompt, Stopping(NEW_TOKENS, eos_token_ids=frozenset({1})))
