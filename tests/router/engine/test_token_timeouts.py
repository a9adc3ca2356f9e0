"""Checks time limits of tokens: against a simple rule in virtual time, with a shard whose steps have a set
duration, and through the APIs."""

import asyncio
import random
import selectors
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import grpc
import pytest

from tests.support.router.engine_pair import Scene, each_of, open_scene
from tests.support.router.fake_shard import VOCAB_SIZE, FakeShard, ShardServer
from tests.support.router.messages import batch, single, stopping
from tests.support.router.model_of_shard import truth
from tests.support.router.served_chats import post
from tests.support.router.served_grpc import open_grpc, status_of
from tests.support.router.served_http import open_http
from tgis.router.engine import token_timeouts
from tgis.router.engine.handle import SequenceId, SequenceSpec
from tgis.router.engine.live_request import EventQueue, LiveRequest, WakeUps
from tgis.router.engine.token_timeouts import TokenTimeouts
from tgis.router.events import Ended, Event, RequestTimes, TimedOut
from tgis.router.sequence import Sequence, Stopping, TokenDetail

pytestmark = pytest.mark.usefixtures("steady_clock")

PROMPT = (21, 22, 23, 24, 25)
LENGTH = 24
LIMIT_S, HANG_S = 0.2, 0.6
FIRST, NEXT = {"first_token_timeout": LIMIT_S}, {"next_token_timeout": LIMIT_S}
SPEC = SequenceSpec(PROMPT, Stopping(LENGTH, min_new_tokens=LENGTH))
EXPECTED = truth(list(PROMPT), LENGTH, VOCAB_SIZE)[len(PROMPT) :]
TOLD = "no token came within 0.2 s"


class VirtualLoop(asyncio.SelectorEventLoop):
    """Event loop in virtual time. Its clock moves only when the loop is idle, directly to the next timer."""

    def __init__(self) -> None:
        super().__init__(selectors.SelectSelector())
        self.now = 1000.0
        select = self._selector.select  # type: ignore[attr-defined]

        def skip(timeout: float | None = None) -> Any:
            self.now += timeout or 0.0
            return select(0)

        self._selector.select = skip  # type: ignore[attr-defined]

    def time(self) -> float:
        return self.now


class Happening(NamedTuple):
    at: float
    kind: str
    """One of `token`, `loss` and `return`."""


def draw_happenings(r: random.Random) -> list[Happening]:
    at, happenings = 0.0, list[Happening]()
    for _ in range(r.randint(0, 30)):
        at += r.choice([0.1, 1.0, 3.0]) * r.random()
        happenings.append(Happening(at, "token"))
        if r.random() < 0.1:
            happenings.append(Happening(at + 0.01, "loss"))
            at += 5 * r.random() + 0.02
            happenings.append(Happening(at, "return"))
    return happenings


def find_late(happenings: list[Happening], first: float | None, further: float | None) -> tuple[float, bool]:
    """Return the time at which a token is late, or infinity, and whether the limit is the first token's."""
    since, is_first, is_away = 0.0, True, False
    for at, kind in [*happenings, Happening(float("inf"), "end")]:
        limit = first if is_first else further
        if limit is not None and not is_away and since + limit < at:
            return since + limit, is_first
        since, is_first, is_away = at, kind == "return", kind == "loss"
    return float("inf"), False


@pytest.mark.parametrize("limits", [(2.0, 0.7), (0.9, None), (None, 0.8), (0.3, 3.0), (None, None)])
def test_texts_are_late_when_the_rule_says(
    limits: tuple[float | None, float | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = VirtualLoop()
    monkeypatch.setattr(token_timeouts, "time", SimpleNamespace(monotonic=loop.time))

    async def drive(seed: int) -> bool:
        happenings, began = draw_happenings(random.Random(seed)), loop.now
        late = list[tuple[float, bool]]()
        timeouts = TokenTimeouts(*limits, lambda _, event: late.append((loop.now - began, event.is_first)))
        live = LiveRequest(
            Sequence([1], Stopping(9)), None, EventQueue(WakeUps().wake), times=RequestTimes(began)
        )
        timeouts.watch(live)
        for at, kind in happenings:
            await asyncio.sleep(began + at - loop.now)
            if late:
                break
            if kind == "token":  # the same updates as in the engine
                was_first, live.awaits_first, live.times.last_token_at = live.awaits_first, False, loop.now
                if was_first:
                    timeouts.watch(live)
            elif kind == "loss":
                timeouts.pause()
            else:
                timeouts.resume([live])
        await asyncio.sleep(10)
        expected_at, is_first = find_late(happenings, *limits)
        assert late == ([] if expected_at == float("inf") else [(pytest.approx(expected_at), is_first)])
        return bool(late)

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        outcomes = [runner.run(drive(seed)) for seed in range(200)]
    assert any(outcomes) == (limits != (None, None))


async def begin(scene: Scene) -> SequenceId:
    return scene.handle.open(await scene.handle.acquire(1), SPEC, None)


async def read(scene: Scene, sequence_id: SequenceId) -> tuple[list[int], Event]:
    """Return the token ids and the final event."""
    events: list[Event] = [event async for event in each_of(scene.handle.events(sequence_id))]
    tokens = [event if isinstance(event, TokenDetail) else getattr(event, "token", None) for event in events]
    return [token.token_id for token in tokens if token is not None], events[-1]


async def skip(events: AsyncIterator[Event], count: int) -> None:
    for _ in range(count):
        assert isinstance(await anext(events), TokenDetail)


async def settle(scene: Scene) -> None:
    """Wait until all steps are answered and their blocks are released."""
    for _ in range(500):
        if "block" not in scene.left():
            return
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("is_split", [False, pytest.param(True, marks=pytest.mark.slow)])
async def test_a_first_token_that_is_late(is_split: bool, tmp_path: Path) -> None:
    async with open_scene(tmp_path, is_split, **FIRST) as scene:
        scene.shard.step_s = HANG_S
        assert await read(scene, await begin(scene)) == ([], TimedOut(LIMIT_S, is_first=True))
        assert "request" not in scene.left()


async def test_a_further_token_that_is_late(tmp_path: Path) -> None:
    async with open_scene(tmp_path, False, **NEXT) as scene:
        scene.shard.step_s = HANG_S  # the first token has no limit
        events = each_of(scene.handle.events(await begin(scene)))
        await asyncio.sleep(HANG_S / 2)  # until the shard is in its step
        scene.shard.step_s = 0.001
        await skip(events, 3)
        scene.shard.step_s = HANG_S
        assert [event async for event in events][-1] == TimedOut(LIMIT_S, is_first=False)


@pytest.mark.slow
async def test_a_text_that_takes_longer_than_a_token_may(tmp_path: Path) -> None:
    async with open_scene(tmp_path, False, first_token_timeout=1.0, next_token_timeout=1.0) as scene:
        scene.shard.step_s = 0.1
        tokens, last = await read(scene, await begin(scene))
        assert isinstance(last, Ended)
        assert tokens == EXPECTED


@pytest.mark.slow
async def test_time_without_shards_does_not_count(tmp_path: Path) -> None:
    """Expect the limit of the first token after the return, and then the limit of the next tokens."""
    limits = {"first_token_timeout": 3 * HANG_S, "next_token_timeout": LIMIT_S}
    async with open_scene(tmp_path, False, **limits) as scene:
        events = each_of(scene.handle.events(await begin(scene)))
        await skip(events, 3)
        scene.server.stop()
        late = await begin(scene)  # while there are no shards
        await asyncio.sleep(4 * HANG_S)
        scene.shard = FakeShard(epoch=2)
        scene.shard.step_s = HANG_S
        scene.server = server = ShardServer(scene.shard, str(tmp_path / "shard"))
        try:
            await skip(events, 1)
            assert [event async for event in events][-1] == TimedOut(LIMIT_S, is_first=False)
            _, last = await read(scene, late)
            assert last == TimedOut(LIMIT_S, is_first=False), "its first token came"
        finally:
            server.stop()


async def test_over_grpc(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with open_grpc(tmp_path, **FIRST) as served:
        served.scene.shard.step_s, long = HANG_S, {"stopping": stopping(LENGTH)}
        calls = [
            served.stub.GenerateStream(single("a", **long)),
            served.stub.Generate(batch("a", "b", **long)),
        ]
        for call in calls:
            assert await status_of(call) == (grpc.StatusCode.DEADLINE_EXCEEDED, TOLD)
        assert served.num_failures("token_timeout") == 2
        assert served.num_failures("generate") == 0
        await settle(served.scene)
    assert f"Streaming response failed with DEADLINE_EXCEEDED: {TOLD}" in caplog.messages


async def test_over_http(tmp_path: Path) -> None:
    async with open_http(tmp_path, **FIRST) as served:
        served.scene.shard.step_s = HANG_S
        body = {"model": "alias", "prompt": "a", "max_tokens": LENGTH}
        status, answer = await post(served, "/v1/completions", body)
        assert (status, answer["error"]["message"]) == (504, TOLD)
        await settle(served.scene)
