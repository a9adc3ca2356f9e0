"""Check that requests survive any loss of the engine process, the shards and other workers, at any time.

In the model, the tokens of an undisturbed generation depend only on its prompt, seed and adapters."""

import asyncio
import random
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import pytest

from tests.support.router.engine_process import EngineProcess, Shards, WorkerProcess
from tests.support.router.fake_shard import VOCAB_SIZE
from tests.support.router.model_of_contents import Item, Library, adapter
from tests.support.router.model_of_shard import EOS, join_digests, truth
from tgis.config.processes import RouterConfig
from tgis.net import framed_channel
from tgis.router.engine.claims import Claims
from tgis.router.engine.handle import EngineHandle, SequenceSpec
from tgis.router.errors import Code, GenerationError, OverloadedError, UnavailableError
from tgis.router.events import Ended, Event, Failed, InputTokens, TimedOut
from tgis.router.remote import messages as wire
from tgis.router.remote import remote_engine
from tgis.router.remote.remote_handle import NO_ADAPTERS
from tgis.router.sequence import CallAdapters, Details, Stopping, StopReason, TokenDetail

NUM_WORKERS, NUM_REQUESTS = 3, 24
IDS = {None: "", "prompt-1": "p1", "prompt-2": "p2"}
LORAS = {None: "", "adapter-1": "a1", "adapter-2": "a2"}
FINAL = Ended | Failed | TimedOut


@dataclass
class Scene:
    config: RouterConfig
    shards: Shards
    engine: EngineProcess
    library: Library
    workers: list[WorkerProcess] = field(default_factory=list)

    async def start_worker(self) -> WorkerProcess:
        worker = WorkerProcess(self.config, len(self.workers))
        self.workers.append(worker)
        await worker.start()
        return worker


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    library = Library()
    for number in (1, 2):
        library.put(Item(f"p{number}", num_decoder_tokens=number), f"prompt-{number}")
        library.put(adapter(f"a{number}"), f"adapter-{number}")
    config = RouterConfig(
        tokenizer_path="",
        shard_uds_path=str(tmp_path / "shard"),
        engine_path=str(tmp_path / "engine"),
        router_workers=NUM_WORKERS,
        max_sequence_length=200,
    )
    scene = Scene(config, Shards(tmp_path, library), EngineProcess(config), library)
    await scene.engine.start()
    await asyncio.gather(*(scene.start_worker() for _ in range(NUM_WORKERS)))
    yield scene
    for _ in range(500):
        if not scene.engine.left():
            break
        await asyncio.sleep(0.01)
    assert scene.engine.left() == {}
    for worker in scene.workers:
        await worker.kill()
    await scene.engine.kill()
    scene.shards.stop()
    assert library.faults == []


async def until_computing(scene: Scene) -> None:
    """Wait until the shard has computed a step."""
    async with asyncio.timeout(60):
        while not scene.shards.shard.num_steps:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.005)


@dataclass(frozen=True)
class Case:
    prompt: tuple[int, ...]
    length: int
    prefix_id: str | None
    adapter_id: str | None
    has_inputs: bool
    stop_at: int | None
    """Number of tokens after which a stop sequence is detected."""

    def expected(self) -> list[int]:
        digests = join_digests(LORAS[self.adapter_id], IDS[self.prefix_id])
        tokens = truth(self._padded(), self.length, VOCAB_SIZE, digests=digests)
        return tokens[len(self._padded()) :][: self.stop_at]

    def _padded(self) -> list[int]:
        num_virtual = 0 if self.prefix_id is None else int(self.prefix_id[-1])
        return [*[2] * num_virtual, *self.prompt]


class StopAt:
    def __init__(self, place: int | None) -> None:
        self.place, self.num_pushed = place, 0

    def push(self, token_id: int, reason: StopReason) -> bool:
        self.num_pushed += 1
        return reason is StopReason.NOT_FINISHED and self.num_pushed == self.place


def make_case(r: random.Random) -> Case:
    length = r.randint(1, 90)
    return Case(
        tuple(r.randrange(3, VOCAB_SIZE) for _ in range(r.randint(1, 40))),
        length,
        r.choice([None, None, *IDS]),
        r.choice([None, None, *LORAS]),
        r.random() < 0.3,
        r.choice([None, None, r.randint(1, length)]),
    )


def make_spec(
    case: Case,
    adapters: CallAdapters = NO_ADAPTERS,
    *,
    deadline: float | None = None,
    request_id: str = "an-id",
) -> SequenceSpec:
    return SequenceSpec(
        case.prompt,
        Stopping(case.length, eos_token_ids=frozenset({EOS}), deadline=deadline),
        details=Details(input_tokens=case.has_inputs, generated_tokens=True, ranks=True),
        adapters=adapters,
        request_id=request_id,
    )


async def generate(
    handle: EngineHandle,
    case: Case,
    start_s: float = 0.0,
    *,
    request_id: str = "an-id",
) -> list[Event]:
    await asyncio.sleep(start_s)
    claim_id = await handle.acquire(1)
    try:
        adapters = await handle.lease(claim_id, case.prefix_id, case.adapter_id, request_id)
        spec = make_spec(case, adapters, request_id=request_id)
        sequence_id = handle.open(claim_id, spec, StopAt(case.stop_at))
        return [event async for events in handle.events(sequence_id) for event in events]
    finally:
        handle.release(claim_id)


def assert_undisturbed(case: Case, events: list[Event]) -> None:
    *others, last = events
    assert isinstance(last, Ended), last
    assert not any(isinstance(event, FINAL) for event in others)
    inputs = [len(event.tokens) for event in others if isinstance(event, InputTokens)]
    assert len(inputs) == case.has_inputs
    if case.has_inputs:
        assert isinstance(others[0], InputTokens)
    tokens = [event for event in (*others, last.token) if isinstance(event, TokenDetail)]
    assert [token.token_id for token in tokens] == case.expected()
    assert last.num_generated == len(tokens)
    assert last.timings.total_s >= last.timings.queue_s >= 0
    assert last.timings.first_token_s is not None


@dataclass
class Crowd:
    """Requests of all workers.

    Requests of a lost worker and cancelled ones end without an answer."""

    scene: Scene
    r: random.Random
    asking: dict[WorkerProcess, set[asyncio.Task[list[Event]]]] = field(
        default_factory=lambda: defaultdict(set)
    )

    def ask(self, case: Case) -> asyncio.Task[list[Event]]:
        return asyncio.create_task(self._ask(case, self.r.uniform(0, 0.4)))

    async def _ask(self, case: Case, start_s: float) -> list[Event]:
        await asyncio.sleep(start_s)
        worker, task = self.r.choice(self.scene.workers), asyncio.current_task()
        assert task is not None
        self.asking[worker].add(task)
        return await generate(worker.remote.handle, case)

    async def lose_worker(self) -> None:
        lost = self.r.choice(self.scene.workers)
        self.scene.workers.remove(lost)
        await lost.kill()
        for task in self.asking.pop(lost, ()):
            task.cancel()
        await self.scene.start_worker()

    def cut_connection(self) -> None:
        """Break the connection between a worker and the engine process, which both stay alive."""
        channel = self.r.choice(self.scene.workers).remote._channel
        if channel is not None and channel._transport is not None:
            channel._transport.abort()

    async def lose(self, *, is_engine: bool, is_shard: bool) -> None:
        shards, engine = self.scene.shards, self.scene.engine
        if is_shard:
            await asyncio.to_thread(shards.stop)
        if is_engine:
            await engine.kill()
        await asyncio.sleep(self.r.choice([0.0, 0.02]))
        if is_shard:
            shards.start()
        if is_engine:
            await engine.start()

    async def disturb(self, num_faults: int) -> None:
        faults = [
            *[partial(self.lose, is_engine=True, is_shard=False)] * 2,
            partial(self.lose, is_engine=False, is_shard=True),
            partial(self.lose, is_engine=True, is_shard=True),
            self.lose_worker,
            self.cut_connection,
        ]
        for _ in range(num_faults):
            await asyncio.sleep(self.r.choice([0.0, 0.01, 0.05, 0.1]))
            if (losing := self.r.choice(faults)()) is not None:
                await losing


@pytest.mark.parametrize("seed", range(6))
async def test_no_loss_ends_or_changes_a_request(scene: Scene, seed: int) -> None:
    r = random.Random(seed)
    scene.shards.shard.step_s = r.choice([0.0, 0.003])
    crowd, cases = Crowd(scene, r), [make_case(r) for _ in range(NUM_REQUESTS)]
    tasks, cancelled = ([crowd.ask(case) for case in part] for part in (cases, cases[::3]))
    disturbing = asyncio.create_task(crowd.disturb(6))
    for task in cancelled:
        await asyncio.sleep(r.uniform(0, 0.1))
        task.cancel()
    await disturbing
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.gather(*cancelled, return_exceptions=True)
    answered = [(case, each) for case, each in zip(cases, ended, strict=True) if not is_cancelled(each)]
    for case, events in answered:
        assert not isinstance(events, BaseException), events
        assert_undisturbed(case, events)
    assert len(answered) >= NUM_REQUESTS / 3


def is_cancelled(answer: object) -> bool:
    return isinstance(answer, asyncio.CancelledError)


async def test_a_lost_worker_ends_only_its_own_requests(scene: Scene) -> None:
    r = random.Random(9)
    lost, *others = scene.workers
    scene.shards.shard.step_s = 0.01
    cases = [make_case(r) for _ in range(NUM_REQUESTS)]
    handles = [r.choice(others).remote.handle for _ in cases]
    tasks = [asyncio.create_task(generate(handle, case)) for handle, case in zip(handles, cases, strict=True)]
    its = [asyncio.create_task(generate(lost.remote.handle, case)) for case in cases[:6]]
    await asyncio.sleep(0.1)
    await lost.kill()
    for task in its:
        task.cancel()
    await asyncio.gather(*its, return_exceptions=True)
    scene.workers.remove(lost)
    again = await scene.start_worker()
    tasks.append(asyncio.create_task(generate(again.remote.handle, cases[0])))
    for case, task in zip([*cases, cases[0]], tasks, strict=True):
        assert_undisturbed(case, await task)


async def test_adapters_in_use_are_kept_though_their_ids_name_others(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that the new engine process leases the adapters by digest, before the shards unload unused ones.

    The workers connect to it late."""
    monkeypatch.setattr(remote_engine, "RETRY_INTERVAL_S", 0.5)
    scene.shards.shard.step_s = 0.01
    case = Case((5, 6, 7), 60, "prompt-1", "adapter-1", has_inputs=False, stop_at=None)
    task = asyncio.create_task(generate(scene.workers[0].remote.handle, case))
    await until_computing(scene)
    num_loads = scene.library.loads.copy()
    scene.library.put(Item("p2", num_decoder_tokens=1), "prompt-1")
    scene.library.put(adapter("a2"), "adapter-1")
    await scene.engine.kill()
    await asyncio.sleep(0.1)  # the workers have tried to connect in vain
    await scene.engine.start()
    assert_undisturbed(case, await task)
    assert set(scene.library.loads) == set(num_loads)


async def test_concurrency_is_held_across_a_loss(scene: Scene) -> None:
    handle = scene.workers[0].remote.handle
    claim_id = await handle.acquire(scene.config.max_concurrent_requests - 1)
    await scene.engine.kill()
    waiting = asyncio.create_task(handle.acquire(1))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await scene.engine.start()
    again = await waiting
    with pytest.raises(OverloadedError):
        await handle.acquire(1)
    handle.release(again)
    handle.release(claim_id)


async def test_an_engine_that_stays_away_ends_requests(scene: Scene) -> None:
    worker = scene.workers[0].remote
    worker._recovery_timeout = 0.2
    scene.shards.shard.step_s = 0.01
    case = Case((5, 6, 7), 90, None, None, has_inputs=False, stop_at=None)
    task = asyncio.create_task(generate(worker.handle, case))
    await until_computing(scene)
    await scene.engine.kill()
    *_, last = await task
    assert isinstance(last, Failed)
    with pytest.raises(UnavailableError):
        await worker.handle.acquire(1)
    await scene.engine.start()
    async with asyncio.timeout(60):
        while True:
            try:
                assert_undisturbed(case, await generate(worker.handle, case))
                break
            except UnavailableError:
                await asyncio.sleep(0.01)


LONG = Case((5, 6, 7), 90, None, None, has_inputs=False, stop_at=None)


async def test_a_worker_that_gives_up_on_an_engine_without_shards_holds_nothing_twice(scene: Scene) -> None:
    worker = scene.workers[0].remote
    worker._recovery_timeout = 0.2
    claim_id = await worker.handle.acquire(3)
    await asyncio.to_thread(scene.shards.stop)
    await scene.engine.kill()
    await scene.engine.start()  # the worker is connected and waits with it
    await asyncio.sleep(0.4)
    scene.shards.start()
    async with asyncio.timeout(60):
        await worker._attached.wait()
    [(created, released)] = scene.engine.left().values()
    assert created - released == 3
    worker.handle.release(claim_id)


async def test_an_engine_that_starts_at_the_end_of_the_time_limit_is_used(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time ends in the turn of the event loop in which the engine's first message arrives. The requests
    of a worker that has closed such a connection would fail for ever."""
    worker = scene.workers[0].remote
    worker._recovery_timeout = 60.0
    open_timeout = asyncio.timeout
    limits = list[asyncio.Timeout]()
    is_waiting = asyncio.Event()
    take = worker._take_state

    def open_noted(delay: float | None) -> asyncio.Timeout:
        limit = open_timeout(delay)
        if delay == worker._recovery_timeout:
            limits.append(limit)
            is_waiting.set()
        return limit

    def take_and_expire(message: wire.State) -> None:
        take(message)
        for limit in limits:
            limit.reschedule(asyncio.get_running_loop().time())
        limits.clear()

    monkeypatch.setattr(asyncio, "timeout", open_noted)
    worker._take_state = take_and_expire  # type: ignore[method-assign]
    task = asyncio.create_task(generate(worker.handle, LONG))
    await asyncio.sleep(0.05)
    await scene.engine.kill()
    await is_waiting.wait()
    await scene.engine.start()
    async with open_timeout(20):
        assert_undisturbed(LONG, await task)
        assert_undisturbed(LONG, await generate(worker.handle, LONG))
    assert not limits


LIMIT_S = 1.2


@pytest.mark.parametrize("is_opened_before", [True, False])
async def test_time_limits_hold_without_an_engine(scene: Scene, is_opened_before: bool) -> None:
    handle, metrics = scene.workers[0].remote.handle, scene.workers[0].remote._metrics
    scene.shards.shard.step_s = 0.05
    claim_id, start = await handle.acquire(1), time.monotonic()
    if not is_opened_before:
        await scene.engine.kill()
    sequence_id = handle.open(claim_id, make_spec(LONG, deadline=start + LIMIT_S), None)
    if is_opened_before:
        await until_computing(scene)
        await asyncio.sleep(LIMIT_S / 4)
        await scene.engine.kill()
    *others, last = [event async for events in handle.events(sequence_id) for event in events]
    assert time.monotonic() - start >= LIMIT_S - 0.01, "timers have a resolution of 1 ms"
    handle.release(claim_id)
    assert isinstance(last, Ended)
    assert last.reason is StopReason.TIME_LIMIT
    assert last.num_generated == len(others)
    assert bool(others) == is_opened_before
    timeouts = metrics.request_failure.values().get(("timeout",), 0)
    assert timeouts == (not is_opened_before)
    await scene.engine.start()


async def test_resumed_requests_may_exceed_a_connections_buffer(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = scene.workers[0].remote.handle
    scene.shards.shard.step_s = 0.02
    text = "x" * 40_000  # stands for a long prompt
    tasks = [asyncio.create_task(generate(handle, LONG, request_id=text)) for _ in range(40)]
    await asyncio.sleep(0.3)
    monkeypatch.setattr(framed_channel, "MAX_UNSENT_BYTES", 1 << 18)
    await scene.engine.kill()
    scene.shards.shard.step_s = 0.0
    await scene.engine.start()
    async with asyncio.timeout(30):
        for task in tasks:
            assert_undisturbed(LONG, await task)


@pytest.mark.usefixtures("steady_clock")
async def test_durations_are_those_of_an_undisturbed_engine(scene: Scene) -> None:
    """Check that the time between two tokens starts at the first of them, and that a request queues once."""
    handle, shard = scene.workers[0].remote.handle, scene.shards.shard
    shard.step_s = 0.01
    streaming = asyncio.create_task(generate(handle, LONG))
    await asyncio.sleep(0.6)
    shard.step_s = 1.0
    starting = asyncio.create_task(generate(handle, replace(LONG, length=3)))
    await asyncio.sleep(0.3)
    before, lost_at = scene.engine.metrics, time.monotonic()
    await scene.engine.kill()
    shard.step_s = 0.0
    await scene.engine.start()
    for task in streaming, starting:
        await task
    took_s = time.monotonic() - lost_at
    assert before is not None
    after = scene.engine.metrics
    assert after is not None
    assert before.request_queue_duration.count + after.request_queue_duration.count == 2
    assert after.inter_token_duration.read([])[1] < took_s + 1.4, (
        "of two requests, one had a step of 1 s before"
    )


async def test_a_question_that_cannot_be_sent_fails_alone(scene: Scene) -> None:
    handle = scene.workers[0].remote.handle
    claim_id = await handle.acquire(1)
    with pytest.raises(UnicodeEncodeError):
        await handle.lease(claim_id, "\ud800", None, "an-id")
    handle.release(claim_id)
    await scene.engine.kill()
    await scene.engine.start()
    assert_undisturbed(LONG, await generate(handle, LONG))


@pytest.mark.parametrize("method", ["open", "lease"])
async def test_a_request_with_an_unforeseen_error_fails_alone(
    scene: Scene, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = scene.workers[0].remote.handle
    scene.shards.shard.step_s = 0.01
    case = replace(LONG, adapter_id="adapter-1")
    other = asyncio.create_task(generate(handle, case))
    await until_computing(scene)
    monkeypatch.setattr(Claims, method, raise_unforeseen)
    text = "Request failed during generation: internal error, request the-one"
    if method == "open":
        assert await generate(handle, case, request_id="the-one") == [Failed(Code.INTERNAL, text)]
    else:
        with pytest.raises(GenerationError, match=text):
            await generate(handle, case, request_id="the-one")
    assert_undisturbed(case, await other)


def raise_unforeseen(*args: object) -> None:
    raise ZeroDivisionError
