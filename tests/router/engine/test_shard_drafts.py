"""Checks drafts that the shards propose and the router never sees: a client gets the same answers as without
drafts, in fewer steps, and the metrics count the drafts."""

import asyncio
import math
from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple, cast

import pytest

from tests.support.router.engine_pair import each_of
from tests.support.router.model_of_shard import EOS, ModelOfShard, Row, next_token
from tests.support.tokenizers.trained import write_byte_level
from tgis.pb import shard_pb2 as pb
from tgis.router.adapters.residency import AdapterResidency
from tgis.router.engine.engine import Engine, TimeLimits
from tgis.router.engine.live_request import EventQueue, LiveRequest, WakeUps
from tgis.router.events import Ended
from tgis.router.metrics.metrics import MetricLimits, Metrics
from tgis.router.scheduling.block_pool import BlockPool
from tgis.router.scheduling.proposers.interface import Proposer
from tgis.router.scheduling.scheduler import Scheduler
from tgis.router.scheduling.step import NO_DRAFTS, DraftResult, Drafts, Step
from tgis.router.scheduling.token_budget import TokenBudget
from tgis.router.sequence import Sequence, Stopping, StopReason, TokenDetail
from tgis.router.shards.client import ShardClient
from tgis.router.shards.codec import StepAnswer, decode_answer, encode_step
from tgis.router.text.detokenizer import Vocabulary
from tgis.router.text.stop_sequences import StopSequences, TextStream
from tgis.router.text.tokenizer import Tokenizer

BLOCK_SIZE, MAX_NEW, MOST = 4, 40, 5
PROMPTS = [[5 + i, 6, 7 + i, 8] * (1 + i % 3) for i in range(8)]


class LeaveToShards:
    """Proposer that lets the shards propose up to the allowed number of drafts."""

    def __init__(self) -> None:
        self.results: list[DraftResult] = []

    def begin(self, num_sequences: int, max_drafts: int) -> bool:
        self.left = max_drafts
        return True

    def propose(self, sequence: Sequence, max_drafts: int) -> Drafts:
        allowed = min(max_drafts, self.left, MOST)
        if allowed <= 0:
            return NO_DRAFTS
        self.left -= allowed
        return Drafts(max_proposed=allowed)

    def follows(self, sequence: Sequence, num_sequences: int) -> bool:
        return True

    def observe(self, step: Step, results: Iterable[DraftResult], seconds: float, follow_s: float) -> None:
        self.results += results


class ModelLink:
    """Link to model shards that answer immediately. About three of four of their drafts are right."""

    def __init__(self, num_blocks: int, vocab_size: int) -> None:
        self.model = ModelOfShard(num_blocks, BLOCK_SIZE, vocab_size)
        self.model.propose = self.propose
        self.answers: deque[tuple[Step, bytes]] = deque()
        self.num_steps = 0
        self.arrival = asyncio.Event()

    def propose(self, row: Row, max_drafts: int) -> list[int]:
        ids = list(row.token_ids)
        for _ in range(max_drafts):
            token = next_token(ids, self.model.vocab_size, row.context)
            ids.append(token if token % 4 else 1)
        return ids[len(row.token_ids) :]

    def send(self, step: Step, timeout_s: float) -> None:
        self.num_steps += 1
        self.answers.append((step, self.model.execute(encode_step(step)).SerializeToString()))
        self.arrival.set()

    async def receive(self) -> StepAnswer:
        while not self.answers:
            self.arrival.clear()
            await self.arrival.wait()
        step, data = self.answers.popleft()
        return decode_answer(step, pb.StepResponse.FromString(data))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tokenizer]:
    directory = tmp_path_factory.mktemp("tokenizer")
    write_byte_level(directory)
    tokenizer = Tokenizer(directory)
    yield tokenizer
    tokenizer.close()


class Shown(NamedTuple):
    """Values that a client sees of a token, without times."""

    text: str
    stop_sequence: str
    token: TokenDetail | None
    reason: StopReason | None


class Outcome:
    def __init__(self, tokenizer: Tokenizer, proposer: Proposer | None, num_blocks: int, stop: str) -> None:
        self.metrics = Metrics(MetricLimits(200, MAX_NEW, 64))
        self.link = ModelLink(num_blocks, tokenizer.fast.get_vocab_size())
        self.engine = Engine(
            AdapterResidency(cast(ShardClient, self.link), self.metrics),
            Scheduler(BlockPool(num_blocks, BLOCK_SIZE), max_sequences=64, proposer=proposer),
            self.metrics,
            budget=TokenBudget(1000, 1.0),
            steps_in_flight=2,
            time_limits=TimeLimits(recovery_s=1.0),
            on_ready=lambda _: None,
        )
        self.vocabulary = Vocabulary(tokenizer)
        self.stops = StopSequences((stop,) if stop else ())
        self.events = asyncio.run(self._run())

    async def _run(self) -> list[list[Shown]]:
        running = asyncio.create_task(self.engine.run())
        events = await asyncio.gather(*map(self._generate, PROMPTS))
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return events

    async def _generate(self, prompt: list[int]) -> list[Shown]:
        sequence = Sequence(list(prompt), Stopping(MAX_NEW, eos_token_ids=frozenset({EOS})))
        text = TextStream(self.vocabulary, self.stops)
        events, shown = EventQueue(WakeUps().wake), []
        self.engine.open(LiveRequest(sequence, text, events))
        async for event in each_of(events):
            assert isinstance(event, TokenDetail | Ended)
            token, reason = (event.token, event.reason) if isinstance(event, Ended) else (event, None)
            shown.append(Shown(*text.take(1), text.stop_sequence if reason else "", token, reason))
        return shown

    def count(self, name: str) -> float:
        (line,) = (
            line for line in self.metrics.render().decode().splitlines() if line.startswith(name + " ")
        )
        return float(line.split()[1])


@pytest.mark.parametrize("num_blocks", [200, 24])
def test_clients_get_the_same_output_without_drafts(tokenizer: Tokenizer, num_blocks: int) -> None:
    plain = Outcome(tokenizer, None, num_blocks, "")
    whole = "".join(event.text for event in plain.events[0])
    for stop in ("", whole[len(whole) // 2 :][:3]):
        plain = Outcome(tokenizer, None, num_blocks, stop)
        drafted = Outcome(tokenizer, LeaveToShards(), num_blocks, stop)
        assert drafted.events == plain.events
        assert any(events[-1].reason is StopReason.STOP_SEQUENCE for events in plain.events) == bool(stop)
        scheduler, model = drafted.engine.scheduler, drafted.link.model
        assert (
            drafted.count("tgi_speculation_drafted_tokens_total")
            == scheduler.num_drafts
            == model.num_proposed
        )
        accepted = drafted.count("tgi_speculation_accepted_tokens_total")
        num_tokens = sum(map(len, plain.events))
        # The shards do not see stop sequences, so the router drops right drafts that follow one.
        assert accepted == model.num_right if not stop else 0 < accepted <= model.num_right
        assert math.ceil(num_tokens / 4) < accepted < scheduler.num_drafts
        assert (scheduler.num_preemptions > 0) == (num_blocks == 24)
        assert scheduler.pool.num_used == 0
        assert plain.count("tgi_speculation_drafted_tokens_total") == 0
        if num_blocks == 200:
            assert drafted.link.num_steps < plain.link.num_steps
