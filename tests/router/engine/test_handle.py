"""Checks both implementations of the engine handle: the local one, and the remote one, which sends values
between processes as bytes."""

import asyncio
import random
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.router.engine_pair import Scene, each_of, open_scene
from tests.support.router.fake_shard import BLOCK_SIZE, EOS, PAD, VOCAB_SIZE
from tests.support.router.model_of_contents import Item, Library, adapter
from tests.support.router.model_of_shard import join_digests, truth
from tgis.pb import shard_pb2 as pb
from tgis.router.engine.handle import ClaimId, Progress, SequenceId, SequenceSpec, TextSink
from tgis.router.errors import Code, OverloadedError
from tgis.router.events import Ended, Event, Failed, InputTokens
from tgis.router.sequence import CacheSalt, Details, Stopping, StopReason, TokenDetail
from tgis.sampling_parameters import Sampling

PROMPT = (21, 22, 23, 24, 25, 26, 27, 28, 29, 30)
LENGTH = 24
EOS_IDS = frozenset({EOS})


@pytest.fixture(params=[False, True], ids=["local", "split"])
async def scene(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Scene]:
    library = Library()
    library.put(Item("p1", num_decoder_tokens=3), "prompt-1")
    library.put(adapter("a1"), "adapter-1")
    async with open_scene(tmp_path, request.param, library=library) as scene:
        yield scene
        for _ in range(500):
            if not scene.left():
                break
            await asyncio.sleep(0.01)
        assert scene.left() == {}


class StopAt:
    """Sink that finds a stop sequence at the token with number `place`, or nowhere if it is 0."""

    def __init__(self, place: int) -> None:
        self.place, self.pushed = place, list[tuple[int, StopReason]]()

    def push(self, token_id: int, reason: StopReason) -> bool:
        self.pushed.append((token_id, reason))
        return reason is StopReason.NOT_FINISHED and len(self.pushed) == self.place


def sampled(seed: int) -> Sampling:
    return Sampling(greedy=False, seed=seed)


def spec(prompt: tuple[int, ...] = PROMPT, length: int = LENGTH, **more: object) -> SequenceSpec:
    stopping = Stopping(length, min_new_tokens=length, eos_token_ids=EOS_IDS)
    return SequenceSpec(prompt, stopping, **more)  # type: ignore[arg-type]


def expected(prompt: tuple[int, ...] = PROMPT, length: int = LENGTH, digests: str = "") -> list[int]:
    """Return the model's tokens, and check that none of them is EOS."""
    tokens = truth(list(prompt), length, VOCAB_SIZE, digests=digests)[len(prompt) :]
    assert len(tokens) == length
    assert EOS not in tokens
    return tokens


async def read(scene: Scene, claim_id: ClaimId, *opened: object) -> list[Event]:
    """Open a sequence, and return all its events."""
    sequence_id = scene.handle.open(claim_id, *opened)  # type: ignore[arg-type]
    return [event async for event in each_of(scene.handle.events(sequence_id))]


def tokens_of(events: list[Event]) -> list[int]:
    """Return the token ids of a generation, and check that its last event is its only Ended event."""
    *others, last = events
    assert isinstance(last, Ended)
    tokens = [event for event in others if isinstance(event, TokenDetail)]
    assert len(tokens) + sum(isinstance(event, InputTokens) for event in others) == len(others)
    return [token.token_id for token in (*tokens, *((last.token,) if last.token else ()))]


async def test_a_generation_is_tokens_and_an_end(scene: Scene) -> None:
    claim_id = await scene.handle.acquire(1)
    sink = StopAt(0)
    events = await read(scene, claim_id, spec(), sink)
    scene.handle.release(claim_id)
    assert tokens_of(events) == expected()
    last = events[-1]
    assert isinstance(last, Ended)
    assert (last.num_generated, last.reason) == (LENGTH, StopReason.MAX_TOKENS)
    reasons = [StopReason.NOT_FINISHED] * (LENGTH - 1) + [StopReason.MAX_TOKENS]
    assert sink.pushed == list(zip(expected(), reasons, strict=True))


async def test_a_sink_ends_a_generation_with_its_token(scene: Scene) -> None:
    """Expect the token in the final event. The length limit has precedence over a stop sequence."""
    claim_id = await scene.handle.acquire(LENGTH)
    for place in range(1, LENGTH + 1):
        sink = StopAt(place)
        events = await read(scene, claim_id, spec(), sink)
        assert tokens_of(events) == expected()[:place]
        assert [token_id for token_id, _ in sink.pushed] == expected()[:place]
        *_, last = events
        assert isinstance(last, Ended)
        reason = StopReason.STOP_SEQUENCE if place < LENGTH else StopReason.MAX_TOKENS
        assert (last.token is not None, last.num_generated, last.reason) == (True, place, reason)
        assert 0 <= last.timings.queue_s <= last.timings.total_s
    scene.handle.release(claim_id)


async def test_a_stop_sequence_costs_the_steps_that_were_on_their_way(tmp_path: Path) -> None:
    async with open_scene(tmp_path, is_split=False) as scene:
        claim_id = await scene.handle.acquire(1)
        await read(scene, claim_id, spec(length=100), StopAt(5))
        await asyncio.sleep(0.2)
        assert 5 <= scene.shard.num_steps <= 5 + 2, "two steps are in flight at most"
        scene.handle.release(claim_id)


@pytest.mark.parametrize("has_inputs", [True, False])
async def test_a_generation_continues_where_it_was_left(scene: Scene, has_inputs: bool) -> None:
    details = Details(input_tokens=True, generated_tokens=True, ranks=True)
    claim_id = await scene.handle.acquire(1)
    whole = await read(scene, claim_id, spec(details=details), None)
    assert [len(event.tokens) for event in whole if isinstance(event, InputTokens)] == [len(PROMPT)]
    for num_known in (0, 1, 7, LENGTH - 1, LENGTH):
        sink, known = StopAt(0), expected()[:num_known]
        progress = Progress([*known], has_inputs)
        events = await read(scene, claim_id, spec(details=details), sink, progress)
        assert [*known, *tokens_of(events)] == expected()
        assert [token_id for token_id, _ in sink.pushed] == expected()[num_known:]
        inputs = [len(event.tokens) for event in events if isinstance(event, InputTokens)]
        assert inputs == ([] if has_inputs or num_known == LENGTH else [len(PROMPT)])
        last = events[-1]
        assert isinstance(last, Ended)
        assert (last.num_generated, last.reason) == (LENGTH, StopReason.MAX_TOKENS)
    scene.handle.release(claim_id)


async def test_an_encoder_s_input_is_reported_once(tmp_path: Path) -> None:
    info = pb.InfoResponse(model_kind=pb.InfoResponse.MODEL_KIND_ENCODER_DECODER, decoder_start_token_id=5)
    for is_split in (False, True):
        async with open_scene(tmp_path, is_split, info) as scene:
            assert scene.handle.info().is_encoder_decoder
            claim_id = await scene.handle.acquire(1)
            asked = spec(details=Details(input_tokens=True))
            whole = await read(scene, claim_id, asked, None)
            assert [len(event.tokens) for event in whole if isinstance(event, InputTokens)] == [len(PROMPT)]
            tokens = tokens_of(whole)
            rest = await read(scene, claim_id, asked, None, Progress(tokens[:3], has_inputs=True))
            assert tokens_of(rest) == tokens[3:]
            assert not any(isinstance(event, InputTokens) for event in rest)
            scene.handle.release(claim_id)


async def test_a_cancelled_sequence_leaves_the_others_alone(scene: Scene) -> None:
    """Cancel some sequences at a token, immediately or later, when they may have ended."""
    r, claim_id = random.Random(1), await scene.handle.acquire(64)

    async def one(place: int, num_turns: int, is_cancelled: bool) -> list[Event]:
        sequence_id, events = scene.handle.open(claim_id, spec(), None), list[Event]()
        async for event in each_of(scene.handle.events(sequence_id)):
            events.append(event)
            if is_cancelled and len(events) == place:
                for _ in range(num_turns):
                    await asyncio.sleep(0.0005)
                break
        scene.handle.cancel(sequence_id)
        scene.handle.cancel(sequence_id)
        return events

    for _ in range(3):
        cases = [(r.randint(1, LENGTH), r.randint(0, 12), r.random() < 0.7) for _ in range(16)]
        results = await asyncio.gather(*(one(*case) for case in cases))
        for (place, _, is_cancelled), events in zip(cases, results, strict=True):
            tokens = [event for event in events if isinstance(event, TokenDetail)]
            if is_cancelled and place < LENGTH:
                assert [token.token_id for token in tokens] == expected()[:place]
            else:
                assert tokens_of(events) == expected()
    scene.handle.release(claim_id)


async def test_a_release_ends_all_of_a_claim_once(scene: Scene) -> None:
    claim_id, other = await scene.handle.acquire(100), await scene.handle.acquire(20)
    with pytest.raises(OverloadedError):
        await scene.handle.acquire(40)
    scene.shard.step_s = 0.05
    adapters = await scene.handle.lease(claim_id, "prompt-1", "adapter-1", "an-id")
    assert adapters.digests == ("p1", "a1")
    assert adapters.num_decoder_tokens == adapters.num_virtual_tokens == 3
    sequence_id = scene.handle.open(claim_id, spec(length=100, adapters=adapters), None)
    await anext(aiter(scene.handle.events(sequence_id)))
    for _ in range(2):
        scene.handle.release(claim_id)
    await asyncio.sleep(0.2)
    assert "request" not in scene.left(), "its sequence goes on"
    scene.handle.cancel(sequence_id)
    again = await scene.handle.acquire(108)
    with pytest.raises(OverloadedError):
        await scene.handle.acquire(1)
    for each in (other, again, claim_id):
        scene.handle.release(each)


async def test_adapters_are_those_that_the_lease_names(scene: Scene) -> None:
    claim_id = await scene.handle.acquire(1)
    adapters = await scene.handle.lease(claim_id, "prompt-1", "adapter-1", "an-id")
    tokens = tokens_of(await read(scene, claim_id, spec(adapters=adapters), None))
    padded = (PAD,) * 3 + PROMPT
    assert tokens == expected(padded, digests=join_digests("a1", "p1"))
    assert adapters.lora is not None
    replaced = replace(adapters, lora=replace(adapters.lora, digest="a0"))
    [event] = await read(scene, claim_id, spec(adapters=replaced, request_id="an-id"), None)
    assert event == Failed(Code.INTERNAL, "Request failed during generation: internal error, request an-id")
    scene.handle.release(claim_id)


async def test_a_cancelled_wait_releases_its_reservation(scene: Scene) -> None:
    """Cancel calls at random times, before or after the engine has answered."""
    r = random.Random(2)
    for _ in range(20):

        async def call() -> None:
            claim_id = await scene.handle.acquire(100)
            try:
                await scene.handle.lease(claim_id, "prompt-1", None, "an-id")
            finally:
                scene.handle.release(claim_id)

        task = asyncio.create_task(call())
        await asyncio.sleep(r.uniform(0, 0.01))
        task.cancel()
        await asyncio.wait((task,))
    for _ in range(50):
        try:
            scene.handle.release(await scene.handle.acquire(128))
            return
        except OverloadedError:
            await asyncio.sleep(0.01)
    pytest.fail("places are lost")


async def test_a_deadline_is_a_time_of_the_machine(scene: Scene) -> None:
    scene.shard.step_s = 0.02
    claim_id, sink = await scene.handle.acquire(1), StopAt(0)
    stopping = Stopping(100, min_new_tokens=100, deadline=time.monotonic() + 0.2)
    events = await read(scene, claim_id, SequenceSpec(PROMPT, stopping), sink)
    scene.handle.release(claim_id)
    last = events[-1]
    assert isinstance(last, Ended)
    assert last.reason is StopReason.TIME_LIMIT
    assert 1 <= last.num_generated < 100
    assert sink.pushed[-1][1] is StopReason.TIME_LIMIT


def num_cached(events: list[Event]) -> int:
    last = events[-1]
    assert isinstance(last, Ended)
    return last.num_cached


async def test_siblings_are_as_if_alone_and_cost_one_prompt(scene: Scene) -> None:
    model = scene.shard.model
    model.uses_seeds = True
    alone = [truth(list(PROMPT), LENGTH, VOCAB_SIZE, sampling_seed=seed)[len(PROMPT) :] for seed in range(4)]
    assert len(set(map(tuple, alone))) == 4
    claim_id = await scene.handle.acquire(4)
    specs = [spec(sampling=sampled(seed)) for seed in range(4)]
    outcomes = await asyncio.gather(*(read(scene, claim_id, each, None) for each in specs))
    scene.handle.release(claim_id)
    assert [tokens_of(events) for events in outcomes] == alone
    assert [num_cached(events) for events in outcomes] == [0] + 3 * [BLOCK_SIZE]
    assert model.num_computed == len(PROMPT) + 3 * (len(PROMPT) - BLOCK_SIZE) + 4 * (LENGTH - 1)


async def test_siblings_outlive_a_leader_that_goes(scene: Scene) -> None:
    """Cancel the leader before, during or after its first step."""
    r = random.Random(3)
    for _ in range(9):
        claim_id = await scene.handle.acquire(4)
        leader, *others = [scene.handle.open(claim_id, spec(), None) for _ in range(4)]
        ends = [asyncio.create_task(_drain(scene, each)) for each in others]
        await asyncio.sleep(r.choice([0, 0.001, 0.003]))
        scene.handle.cancel(leader)
        scene.handle.cancel(others[0])
        whole = [tokens_of(await end) for end in ends[1:]]
        ends[0].cancel()
        scene.handle.release(claim_id)
        assert whole == [expected()] * 2


async def _drain(scene: Scene, sequence_id: SequenceId) -> list[Event]:
    return [event async for event in each_of(scene.handle.events(sequence_id))]


async def _wait_for_steps(scene: Scene, num_steps: int) -> None:
    for _ in range(10_000):
        if scene.shard.num_steps >= num_steps:
            return
        await asyncio.sleep(0.001)
    pytest.fail("the steps do not come")


async def test_siblings_survive_a_loss_of_the_shards(scene: Scene) -> None:
    """Expect the cached tokens of the first start, although inputs are computed again after a loss."""
    claim_id = await scene.handle.acquire(12)
    prompts = [(30 + number, *PROMPT) for number in range(3)]
    generations = [
        asyncio.create_task(read(scene, claim_id, spec(prompt, 40), None))
        for prompt in prompts
        for _ in range(4)
    ]
    for num_steps in (3, 16, 16):  # crash suspects run one by one before the next loss
        await _wait_for_steps(scene, scene.shard.num_steps + num_steps)
        scene.server.cut()
    outcomes = [await each for each in generations]
    scene.handle.release(claim_id)
    assert scene.shard.num_streams == 4
    for number, prompt in enumerate(prompts):
        family = outcomes[4 * number : 4 * number + 4]
        assert [tokens_of(events) for events in family] == [expected(prompt, 40)] * 4
        assert {num_cached(events) for events in family} <= {0, BLOCK_SIZE}


async def test_salts_never_share(scene: Scene) -> None:
    salts = [CacheSalt(), CacheSalt("a"), CacheSalt("", b"a"), CacheSalt("a", b"a"), CacheSalt("b", b"a")]
    claim_id = await scene.handle.acquire(1)
    counts = [
        num_cached(await read(scene, claim_id, spec(length=2, cache_salt=salt), None))
        for salt in (*salts, *salts)
    ]
    assert counts == [0] * 5 + [BLOCK_SIZE] * 5
    both = (CacheSalt("c"), CacheSalt("d"))  # concurrently, with one claim
    outcomes = await asyncio.gather(
        *(read(scene, claim_id, spec(length=2, cache_salt=salt), None) for salt in both)
    )
    assert list(map(num_cached, outcomes)) == [0, 0]
    scene.handle.release(claim_id)


async def test_virtual_tokens_are_not_among_the_cached(scene: Scene) -> None:
    claim_id = await scene.handle.acquire(1)
    adapters = await scene.handle.lease(claim_id, "prompt-1", None, "an-id")
    counts = [num_cached(await read(scene, claim_id, spec(adapters=adapters), None)) for _ in range(2)]
    resumed = spec(length=LENGTH, adapters=adapters)
    known = tuple(expected((PAD,) * 3 + PROMPT, digests=join_digests("", "p1"))[:12])
    counts.append(num_cached(await read(scene, claim_id, resumed, None, Progress([*known], True))))
    scene.handle.release(claim_id)
    assert counts == [0, BLOCK_SIZE - 3, len(PROMPT)]  # generated tokens do not count as input tokens


async def test_an_encoder_s_input_is_cached_whole(tmp_path: Path) -> None:
    info = pb.InfoResponse(model_kind=pb.InfoResponse.MODEL_KIND_ENCODER_DECODER, decoder_start_token_id=5)
    for is_split in (False, True):
        async with open_scene(tmp_path, is_split, info) as scene:
            claim_id = await scene.handle.acquire(3)
            outcomes = await asyncio.gather(*(read(scene, claim_id, spec(), None) for _ in range(3)))
            scene.handle.release(claim_id)
            assert scene.shard.model.num_encoded == len(PROMPT)
            assert list(map(num_cached, outcomes)) == [0, len(PROMPT), len(PROMPT)]


def test_the_sinks_here_are_sinks() -> None:
    sink: TextSink = StopAt(1)
    assert sink.push(1, StopReason.NOT_FINISHED)
