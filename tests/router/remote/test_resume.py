"""Requests outlive the engine process, the shards and other workers, whatever is lost, and when. The model is
plain: an undisturbed generation's tokens follow from its prompt, its seed and its adapters alone."""

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support.router.engine_process import EngineProcess, Shards, WorkerProcess
from tests.support.router.fake_shard import VOCAB_SIZE
from tests.support.router.model_of_contents import Item, Library, adapter
from tests.support.router.model_of_shard import EOS, join_digests, truth
from tgis.config.processes import RouterConfig
from tgis.router.engine.handle import EngineHandle, SequenceSpec
from tgis.router.errors import OverloadedError, UnavailableError
from tgis.router.events import Ended, Event, Failed, InputTokens, TimedOut
from tgis.router.remote import remote_engine
from tgis.router.sequence import Details, Stopping, StopReason, TokenDetail

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


@dataclass(frozen=True)
class Case:
    prompt: tuple[int, ...]
    length: int
    prefix_id: str | None
    adapter_id: str | None
    has_inputs: bool
    stop_at: int | None
    """Number of tokens after which the door finds a stop sequence."""

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


async def generate(handle: EngineHandle, case: Case, start_s: float) -> list[Event]:
    await asyncio.sleep(start_s)
    ticket = await handle.acquire(1)
    try:
        lease = await handle.lease(ticket, case.prefix_id, case.adapter_id, "an-id")
        spec = SequenceSpec(
            case.prompt,
            Stopping(case.length, eos_token_ids=frozenset({EOS})),
            details=Details(input_tokens=case.has_inputs, generated_tokens=True, ranks=True),
            lease=lease,
        )
        sequence_id = handle.open(ticket, spec, StopAt(case.stop_at))
        return [event async for events in handle.events(sequence_id) for event in events]
    finally:
        handle.release(ticket)


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


async def disturb(scene: Scene, r: random.Random, num_faults: int) -> None:
    """Lose the engine, the shards, or both, one after the other."""
    for _ in range(num_faults):
        await asyncio.sleep(r.choice([0.0, 0.01, 0.05, 0.1]))
        is_engine, is_shard = r.choice([(True, False), (True, False), (False, True), (True, True)])
        if is_shard:
            await asyncio.to_thread(scene.shards.stop)
        if is_engine:
            await scene.engine.kill()
        await asyncio.sleep(r.choice([0.0, 0.02]))
        if is_shard:
            scene.shards.start()
        if is_engine:
            await scene.engine.start()


@pytest.mark.parametrize("seed", range(4))
async def test_no_loss_ends_or_changes_a_request(scene: Scene, seed: int) -> None:
    r = random.Random(seed)
    cases = [make_case(r) for _ in range(NUM_REQUESTS)]
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(generate(r.choice(scene.workers).remote.handle, case, r.uniform(0, 0.4)))
            for case in cases
        ]
        group.create_task(disturb(scene, r, 5))
    for case, task in zip(cases, tasks, strict=True):
        assert_undisturbed(case, task.result())


async def test_a_lost_worker_takes_its_own_requests_only(scene: Scene) -> None:
    r = random.Random(9)
    lost, *others = scene.workers
    scene.shards.shard.step_s = 0.01
    cases = [make_case(r) for _ in range(NUM_REQUESTS)]
    handles = [r.choice(others).remote.handle for _ in cases]
    tasks = [
        asyncio.create_task(generate(handle, case, 0.0)) for handle, case in zip(handles, cases, strict=True)
    ]
    its = [asyncio.create_task(generate(lost.remote.handle, case, 0.0)) for case in cases[:6]]
    await asyncio.sleep(0.1)
    await lost.kill()
    for task in its:
        task.cancel()
    await asyncio.gather(*its, return_exceptions=True)
    scene.workers.remove(lost)
    again = await scene.start_worker()
    tasks.append(asyncio.create_task(generate(again.remote.handle, cases[0], 0.0)))
    for case, task in zip([*cases, cases[0]], tasks, strict=True):
        assert_undisturbed(case, await task)


async def test_adapters_in_use_are_kept_though_their_ids_name_others(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new engine process takes them by what they are, before the shards unload the others, although the
    workers find it late."""
    monkeypatch.setattr(remote_engine, "RETRY_INTERVAL_S", 0.5)
    scene.shards.shard.step_s = 0.01
    case = Case((5, 6, 7), 60, "prompt-1", "adapter-1", has_inputs=False, stop_at=None)
    task = asyncio.create_task(generate(scene.workers[0].remote.handle, case, 0.0))
    await asyncio.sleep(0.2)
    num_loads = scene.library.loads.copy()
    scene.library.put(Item("p2", num_decoder_tokens=1), "prompt-1")
    scene.library.put(adapter("a2"), "adapter-1")
    await scene.engine.kill()
    await asyncio.sleep(0.1)  # the workers have looked for it in vain
    await scene.engine.start()
    assert_undisturbed(case, await task)
    assert set(scene.library.loads) == set(num_loads)


async def test_concurrency_is_held_across_a_loss(scene: Scene) -> None:
    handle = scene.workers[0].remote.handle
    ticket = await handle.acquire(scene.config.max_concurrent_requests - 1)
    await scene.engine.kill()
    waiting = asyncio.create_task(handle.acquire(1))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await scene.engine.start()
    again = await waiting
    with pytest.raises(OverloadedError):
        await handle.acquire(1)
    handle.release(again)
    handle.release(ticket)


async def test_an_engine_that_stays_away_ends_requests(scene: Scene) -> None:
    worker = scene.workers[0].remote
    worker._recovery_timeout = 0.2
    scene.shards.shard.step_s = 0.01
    case = Case((5, 6, 7), 90, None, None, has_inputs=False, stop_at=None)
    task = asyncio.create_task(generate(worker.handle, case, 0.0))
    await asyncio.sleep(0.1)
    await scene.engine.kill()
    *_, last = await task
    assert isinstance(last, Failed)
    with pytest.raises(UnavailableError):
        await worker.handle.acquire(1)
    await scene.engine.start()
    async with asyncio.timeout(10):
        while True:
            try:
                assert_undisturbed(case, await generate(worker.handle, case, 0.0))
                break
            except UnavailableError:
                await asyncio.sleep(0.01)
