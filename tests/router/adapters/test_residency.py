"""Check which adapters the router keeps loaded on shards behind real sockets.

Concurrent calls share one load, the cache limit holds, referenced entries stay, and every reference is
released."""

import asyncio
import itertools
import random
import threading
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import grpc
import pytest

from tests.support.router.adapter_group import LIMIT_S, ROOM, Group, open_group
from tests.support.router.fake_shard import NUM_THREADS
from tests.support.router.model_of_contents import ADAPTER, PROMPT, Item, adapter
from tgis.router.errors import (
    GenerationError,
    OverloadedError,
    RequestError,
    RouterError,
    StartupError,
    UnavailableError,
)
from tgis.router.scheduling.block_pool import BlockPool
from tgis.router.scheduling.scheduler import Scheduler
from tgis.router.sequence import AdapterKind, Sequence, Stopping

LONG_S = 20.0


@pytest.fixture
async def group(tmp_path: Path) -> AsyncIterator[Group]:
    async with open_group(tmp_path) as group:
        group.limit(LONG_S)
        yield group


async def test_many_calls_share_one_look_up_and_one_load(group: Group) -> None:
    group.library.find_s = group.library.load_s = 0.1
    assert (
        await asyncio.gather(*(group.use("prompt-1", "adapter-1") for _ in range(20))) == [["a1", "p1"]] * 20
    )
    assert group.library.loads == {"p1": 1, "a1": 1}
    assert group.library.finds == {"prompt-1": 1, "adapter-1": 1}
    assert group.loaded() == {"p1", "a1"}
    group.library.find_s = 0
    assert await group.use("prompt-1") == ["p1"]
    assert group.library.finds["prompt-1"] == 2
    assert group.library.loads["p1"] == 1


async def test_a_machine_without_a_copy_gets_one(group: Group) -> None:
    """Check one copy to each machine, and a second one after the machine was replaced."""
    group.library.elsewhere[1] = {"p1"}
    await group.use("prompt-1", "adapter-1")
    assert group.loaded() == {"p1", "a1"}
    assert group.library.relayed == {1: 1}
    with group.lease("prompt-1") as lease:
        await lease.take()
        group.library.elsewhere[1] = {"p1"}
        group.stop()
        group.serve(epoch=2)
        await group.residency.connect()
        assert group.loaded() == {"p1"}
    assert group.library.relayed == {1: 2}


async def test_a_machine_that_refuses_a_copy(group: Group) -> None:
    """Check that the error gives its cause and that the next call is served."""
    full = (grpc.StatusCode.RESOURCE_EXHAUSTED, "no room is left for a copy")
    group.library.elsewhere[1], group.library.put_error = {"p1"}, full
    with pytest.raises(RouterError, match="no room is left for a copy"):
        await group.use("prompt-1")
    group.library.put_error = None
    assert await group.use("prompt-1") == ["p1"]


@pytest.mark.parametrize("slow", ["find_s", "load_s"])
async def test_remaining_calls_are_not_cancelled_with_others(group: Group, slow: str) -> None:
    setattr(group.library, slow, 0.15)
    calls = [asyncio.create_task(group.use("prompt-1")) for _ in range(4)]
    await asyncio.sleep(0.05)
    for call in calls[:3]:  # the first of them started the lookup
        call.cancel()
    assert await calls[3] == ["p1"]
    assert [call.cancelled() for call in calls] == [True, True, True, False]
    assert group.library.finds["prompt-1"] == 1


@pytest.mark.usefixtures("steady_clock")
async def test_a_call_that_comes_as_the_last_one_goes_looks_up_again(group: Group) -> None:
    group.library.find_s = 0.1
    first = asyncio.create_task(group.use("prompt-1"))
    await asyncio.sleep(0.03)
    first.cancel()
    await asyncio.sleep(0)
    assert await group.use("prompt-1") == ["p1"]
    assert first.cancelled()


async def test_stuck_look_ups_end_and_leave_threads_for_others(group: Group) -> None:
    group.limit(4 * LIMIT_S)
    group.library.stuck = threading.Event()
    calls = [asyncio.create_task(group.use(f"prompt-{i}")) for i in range(40)]
    await asyncio.sleep(0.1)
    assert await group.use(adapter_id="") == []
    errors = await asyncio.gather(*calls, return_exceptions=True)
    group.library.stuck.set()
    group.library.stuck = None
    group.limit(LONG_S)
    texts = [f"can't retrieve prompt prefix with id 'prompt-{i}': Timeout expired" for i in range(40)]
    assert [str(error) for error in errors] == texts
    assert {type(error) for error in errors} == {RequestError}
    # On a slow machine, a lookup may still start when earlier ones time out; their threads are stuck here.
    assert 16 <= group.library.max_finding < NUM_THREADS
    await asyncio.sleep(0.1)
    assert await group.use("prompt-1") == ["p1"]


async def test_the_most_recently_used_adapter_stays(group: Group) -> None:
    for i in (1, 2, 3, 1, 4):
        await group.use(f"prompt-{i}", f"adapter-{i}")
    await group.settle()
    assert group.loaded() == {"p3", "p1", "p4", "a3", "a1", "a4"}
    await group.use("prompt-2")
    assert group.library.loads["p2"] == 2


@pytest.mark.usefixtures("steady_clock")
async def test_referenced_entries_stay_and_a_full_cache_is_reported(group: Group) -> None:
    with group.lease("prompt-1") as one, group.lease("prompt-2") as two:
        await asyncio.gather(one.take(), two.take())
        assert await group.use("prompt-3") == ["p3"]
        assert await group.use("prompt-4") == ["p4"]
        assert group.loaded() == {"p1", "p2", "p4"}
        with group.lease("prompt-4") as three:
            await three.take()
            group.limit(2 * LIMIT_S)
            began = asyncio.get_running_loop().time()
            with pytest.raises(OverloadedError, match=r"^Model is overloaded$"):
                await group.use("prompt-5")
            assert asyncio.get_running_loop().time() - began > 2 * LIMIT_S - 0.1
            group.limit(LONG_S)
            waiting = asyncio.create_task(group.use("prompt-6"))
            assert await group.use(adapter_id="adapter-1") == ["a1"]  # adapters have their own memory
            await asyncio.sleep(0.1)
            assert not waiting.done()
        assert await waiting == ["p6"]
        assert group.loaded() == {"p1", "p2", "p6", "a1"}
    assert group.metrics.prompts.load_failure.values()[()] == 1


async def test_a_large_one_is_not_overtaken_for_ever(group: Group) -> None:
    group.library.put(Item("large", num_bytes=ROOM * 1024), "large")
    group.library.put(Item("larger", num_bytes=ROOM * 1024 + 1), "larger")

    async def traffic(number: int) -> None:
        for i in range(100):
            if is_served.is_set():
                return
            group.library.put(Item(f"{number}-{i}"), f"{number}-{i}")
            with group.lease(f"{number}-{i}") as lease:
                await lease.take()
                await asyncio.sleep(0.01 + 0.007 * number)

    is_served = asyncio.Event()
    calls = [asyncio.create_task(traffic(number)) for number in range(8)]
    await asyncio.sleep(0.02)
    assert await group.use("large") == ["large"]
    assert not any(call.done() for call in calls)
    is_served.set()
    await asyncio.gather(*calls)
    with pytest.raises(RequestError) as caught:
        await group.use("larger")
    cause = "Prefix ID object larger exceeds the allowed cache size"
    assert str(caught.value) == f"can't retrieve prompt prefix with id 'larger': {cause}"


async def test_a_replaced_one_is_found_and_the_old_one_stays_while_it_is_used(group: Group) -> None:
    with group.lease("prompt-1") as lease:
        await lease.take()
        group.library.put(Item("new"), "prompt-1")
        assert await group.use("prompt-1") == ["new"]
        for i in (2, 3, 4):
            await group.use(f"prompt-{i}")
        assert "p1" in group.loaded()


async def test_a_copy_lost_between_lookup_and_load_is_made_again(group: Group) -> None:
    for adapter_id in ("prompt-1", "prompt-2"):
        info = await group.registry.find(AdapterKind.SOFT_PROMPT, adapter_id)
        del group.library.copies[info.digest]
        entry = await group.registry.load(info, AdapterKind.SOFT_PROMPT, adapter_id, 0.0)
        assert entry.info is info
        group.residency.release(entry)
        assert group.library.finds[adapter_id] == 2


async def test_an_entry_removed_between_lookup_and_load_is_refused(group: Group) -> None:
    """Check that an entry replaced in between is loaded with its new content."""
    find = group.link.find

    async def find_and_change(*args: object) -> object:
        result = await find(*args)  # type: ignore[arg-type]
        if group.library.finds["prompt-1"] == 1:
            group.library.copies.clear()
            group.library.store[PROMPT, "prompt-1"] = Item("new")
        if group.library.finds["prompt-2"] == 1:
            group.library.copies.clear()
            group.library.store.clear()
        return result

    group.link.find = find_and_change  # type: ignore[method-assign, assignment]
    assert await group.use("prompt-1") == ["new"]
    with pytest.raises(RequestError) as caught:
        await group.use("prompt-2")
    cause = 'prefix id "prompt-2" not found'
    assert str(caught.value) == f"can't retrieve prompt prefix with id 'prompt-2': {cause}"


REFUSED = [
    (grpc.StatusCode.INVALID_ARGUMENT, "wrong width", RequestError, "wrong width"),
    (grpc.StatusCode.DEADLINE_EXCEEDED, "others are being read", RequestError, "Timeout expired"),
    (grpc.StatusCode.RESOURCE_EXHAUSTED, "0x7f", GenerationError, "out of memory"),
    (grpc.StatusCode.INTERNAL, "/a/path", GenerationError, None),
    (grpc.StatusCode.UNKNOWN, "a traceback", GenerationError, None),
]


async def test_a_load_that_fails_on_any_rank_is_undone_on_all(group: Group) -> None:
    expected = "Request failed during generation: internal error, request an-id"
    for rank, (code, details, error, cause) in itertools.product(range(2), REFUSED):
        group.library.errors = {(rank, "a1"): (code, details), (rank, "p1"): (code, details)}
        texts = {
            "adapter-1": f"can't retrieve adapter with id 'adapter-1': {cause}" if cause else expected,
            "prompt-1": f"can't retrieve prompt prefix with id 'prompt-1': {cause}" if cause else expected,
        }
        for ids in ((None, "adapter-1"), ("prompt-1", None)):
            with pytest.raises(error) as caught:
                await group.use(*ids)
            assert str(caught.value) == texts[ids[0] or ids[1] or ""]
        await group.settle()
        assert group.loaded() == set()
        group.library.errors.clear()
        assert await group.use("prompt-2", "adapter-2") == ["a2", "p2"]
        await group.residency.connect()  # removes entries without references


async def test_a_load_waits_for_an_unload_that_is_on_its_way(group: Group) -> None:
    group.library.errors[1, "p1"] = (grpc.StatusCode.INVALID_ARGUMENT, "bad")
    group.library.unload_s = 0.1
    with pytest.raises(RequestError):
        await group.use("prompt-1")
    group.library.errors.clear()
    with group.lease("prompt-1") as lease:
        await lease.take()
        await asyncio.sleep(0.15)
        assert group.loaded() == {"p1"}


async def test_a_call_that_goes_while_it_waits_for_an_unload_leaves_nothing_behind(
    group: Group,
) -> None:
    """Check that the next call for the same adapter waits for both unloads."""
    group.library.errors[1, "p1"] = (grpc.StatusCode.INVALID_ARGUMENT, "bad")
    group.library.unload_s = 0.1
    with pytest.raises(RequestError):
        await group.use("prompt-1")
    group.library.errors.clear()
    going = asyncio.create_task(group.use("prompt-1"))
    await asyncio.sleep(0.05)
    going.cancel()
    with group.lease("prompt-1") as lease:
        await lease.take()
        await group.settle()
        assert group.loaded() == {"p1"}


async def test_a_load_that_the_lost_shards_had_done_is_done_again(group: Group) -> None:
    load = group.link.load

    async def load_and_lose(digest: str, timeout_s: float) -> None:
        await load(digest, timeout_s)
        if group.library.loads[digest] == 1:
            for shard in group.shards:
                shard.shelf.loaded.clear()
            await group.residency.connect()

    group.link.load = load_and_lose  # type: ignore[method-assign]
    assert await group.use("prompt-1") == ["p1"]
    assert group.loaded() == {"p1"}


async def test_preloaded_adapters_follow_their_current_names(group: Group) -> None:
    group.shards[0].info.preloaded_adapter_ids.extend(["adapter-1", "adapter-2"])
    await group.registry.start()
    assert group.loaded() == {"a1", "a2"}
    for i in range(3, 8):
        await group.use(adapter_id=f"adapter-{i}")
    group.library.put(adapter("replaced"), "adapter-1")
    assert await group.use(adapter_id="adapter-1") == ["replaced"]
    for i in range(3, 8):
        await group.use(adapter_id=f"adapter-{i}")
    assert group.loaded() == {"replaced", "a2", "a7"}
    await group.residency.connect()
    assert group.loaded() == {"replaced", "a2"}
    for entry in group.registry._pinned.values():
        group.residency.release(entry)


@pytest.mark.parametrize("error", ["missing", "bad", "too many"])
async def test_adapters_that_cannot_be_preloaded_give_one_line(group: Group, error: str) -> None:
    names = [f"adapter-{i}" for i in range(1, 5)]
    cause = "can't retrieve adapter with id 'adapter-2': directory does not exist"
    expected = f"the adapter 'adapter-2' cannot be preloaded: {cause}"
    if error == "missing":
        del group.library.store[ADAPTER, "adapter-2"]
    elif error == "bad":
        group.library.errors[0, "a2"] = (grpc.StatusCode.INVALID_ARGUMENT, "directory does not exist")
    else:
        expected = (
            "the adapter 'adapter-4' cannot be preloaded: it does not fit into memory with the others; "
        )
        expected += "increase --adapter-cache-size-mb or preload fewer"
    group.shards[0].info.preloaded_adapter_ids.extend(names)
    with pytest.raises(StartupError) as caught:
        await group.registry.start()
    assert str(caught.value) == expected
    for entry in group.registry._pinned.values():
        group.residency.release(entry)


async def test_a_failed_lookup_reports_its_cause_or_nothing(group: Group) -> None:
    group.library.errors = {
        (-1, "adapter-1"): (grpc.StatusCode.INVALID_ARGUMENT, "the complete text"),
        (-1, "adapter-2"): (grpc.StatusCode.INTERNAL, "/a/path"),
    }
    with pytest.raises(RequestError, match=r"^the complete text$"):
        await group.use(adapter_id="adapter-1")
    with pytest.raises(GenerationError, match=r"internal error, request an-id$"):
        await group.use(adapter_id="adapter-2")
    assert group.metrics.adapters.load_failure.values()[()] == 2


async def test_nothing_is_unloaded_before_the_steps_on_their_way_are_answered(group: Group) -> None:
    """Check that unloading waits for steps in flight, whose rows need the entry on all ranks."""
    with group.lease("prompt-1") as lease:
        adapters = await lease.take()
        scheduler = Scheduler(BlockPool(64, 8), max_sequences=4)
        sequence = Sequence([2, 5], Stopping(max_new_tokens=9), adapters=adapters)
        scheduler.add(sequence)
        group.shards[1].step_s = 0.2
        step = scheduler.next_step(100)
        assert step is not None
        group.link.send(step, timeout_s=0)
        scheduler.finish(sequence)
    group.library.put(Item("large", num_bytes=ROOM * 1024), "large")
    load = asyncio.create_task(group.use("large"))
    await asyncio.sleep(0.1)
    assert group.loaded() == {"p1"}
    await group.link.receive()
    assert await load == ["large"]


async def test_a_loss_of_the_shards_is_a_pause(group: Group) -> None:
    with group.lease("prompt-1") as one, group.lease("prompt-2") as two:
        await one.take()
        adapters = await two.take()
        await group.use("prompt-3")
        group.library.load_s = 0.5
        on_its_way = asyncio.create_task(group.use("prompt-4", "adapter-4"))
        async with asyncio.timeout(60):
            while not group.library.finds["adapter-4"] or group.library.num_finding:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        await asyncio.sleep(0.1)  # until it is being loaded
        group.library.load_s = 0.06
        group.stop()
        group.library.store.clear()  # an entry in use needs only its copy
        del group.library.copies["p2"]
        group.serve(epoch=2)
        group.shards[0].shelf.loaded["left over"] = Item("left over")
        await group.residency.connect()
        assert [group.residency.has(info) for info in adapters.present] == [False]
        error = (await asyncio.gather(on_its_way, return_exceptions=True))[0]
        assert isinstance(error, RequestError)  # the prompt had not been looked up yet
        await group.settle()
        assert group.loaded() == {"p1", "a4"}
    assert group.metrics.prompts.entries._read() == 1


async def test_calls_wait_for_shards_until_they_are_given_up(group: Group) -> None:
    group.limit(LIMIT_S)
    group.stop()
    connecting = asyncio.create_task(group.residency.connect())
    await asyncio.sleep(0)
    call = asyncio.create_task(group.use("prompt-1"))
    await asyncio.sleep(LIMIT_S + 0.2)
    assert not call.done()
    group.residency.give_up()
    with pytest.raises(UnavailableError):
        await call
    with pytest.raises(UnavailableError):
        await group.use("prompt-1")
    group.serve(epoch=2)
    await connecting
    assert await group.use("prompt-1") == ["p1"]


@pytest.mark.parametrize("seed", range(2))
async def test_storms_leave_no_reference_and_no_stray(group: Group, seed: int) -> None:
    """Check random calls with a small cache: some are cancelled, some fail, entries are replaced, shards are
    lost."""
    r = random.Random(seed)
    group.library.errors = {
        (1, "p0"): (grpc.StatusCode.INVALID_ARGUMENT, "bad"),
        (0, "a0"): (grpc.StatusCode.INTERNAL, "bad"),
    }
    served = 0

    async def call() -> None:
        nonlocal served
        await asyncio.sleep(r.random() / 3)
        i, j = r.randrange(9), r.randrange(9)
        with suppress(RouterError), group.lease(f"prompt-{i}", r.choice([None, f"adapter-{j}"])) as lease:
            adapters = await lease.take()
            served += 1
            for _ in range(r.randrange(5)):
                held = {info.digest for info in adapters.present}
                assert all(held <= shard.shelf.loaded.keys() for shard in group.shards)
                await asyncio.sleep(r.random() / 100)

    calls = [asyncio.create_task(call()) for _ in range(150)]
    for turn in range(25):
        await asyncio.sleep(0.02)
        r.choice(calls).cancel()
        k = r.randrange(1, 9)
        group.library.put(Item(f"p{k}-{turn}", num_bytes=r.choice([100, 1024, 2048])), f"prompt-{k}")
        if turn == 12 and seed % 2:
            await group.residency.connect()
    await asyncio.gather(*calls, return_exceptions=True)
    assert {str(call.exception()) for call in calls if not call.cancelled()} == {"None"}
    await group.settle()
    assert served > 10  # a slow machine serves few calls before their time limit
    assert group.residency.num_references == 0
    assert group.loaded() == {entry.info.digest for entry in group.residency._all_entries()}
    assert group.library.faults == []
    for kind, metrics in ((PROMPT, group.metrics.prompts), (ADAPTER, group.metrics.adapters)):
        items = [item for item in group.shards[0].shelf.loaded.values() if item.kind == kind]
        assert metrics.bytes._read() == sum(item.num_bytes for item in items)
        assert metrics.entries._read() == len(items)


async def test_an_entry_that_fits_does_not_wait_behind_one_that_does_not(group: Group) -> None:
    """Check that calls do not wait for an entry whose caller has left."""
    group.library.put(adapter("large", num_bytes=3 * 1024), "large")
    with group.lease(adapter_id="adapter-1") as one:
        await one.take()
        large = asyncio.create_task(group.use(adapter_id="large"))
        await asyncio.sleep(0.05)
        assert await group.use(adapter_id="adapter-2") == ["a2"]
        assert not large.done()
        large.cancel()
        gone = asyncio.create_task(group.use(adapter_id="large"))
        await asyncio.sleep(0.05)
        gone.cancel()
        with group.lease(adapter_id="adapter-3") as three, group.lease(adapter_id="adapter-4") as four:
            await three.take()
            await four.take()  # a2 is evicted: no call is ahead
    await group.settle()
    assert await group.use(adapter_id="large") == ["large"]


@pytest.mark.usefixtures("steady_clock")
async def test_room_is_promised_to_the_one_that_others_make_way_for(group: Group) -> None:
    group.library.put(adapter("large", num_bytes=3 * 1024), "large")
    for i in (1, 2, 3):
        await group.use(adapter_id=f"adapter-{i}")
    group.library.unload_s = 0.1
    large = asyncio.create_task(group.use(adapter_id="large"))
    await asyncio.sleep(0.05)
    small = asyncio.create_task(group.use(adapter_id="adapter-4"))
    assert await large == ["large"]
    assert await small == ["a4"]


async def test_an_adapter_of_the_start_makes_way_for_its_successor(group: Group) -> None:
    """Check entries that do not fit together; a combination that can never fit is refused at once."""
    group.library.put(adapter("old", num_bytes=2 * 1024), "kept")
    group.library.put(adapter("large", num_bytes=2 * 1024), "large")
    group.shards[0].info.preloaded_adapter_ids.append("kept")
    await group.registry.start()
    with pytest.raises(RequestError, match="exceeds the allowed cache size"):
        await asyncio.wait_for(group.use(adapter_id="large"), LONG_S / 2)
    group.library.put(adapter("new", num_bytes=2 * 1024), "kept")
    assert await asyncio.wait_for(group.use(adapter_id="kept"), LONG_S / 2) == ["new"]
    for i in (1, 2, 3):
        await group.use(adapter_id=f"adapter-{i}")
    await group.settle()
    assert "new" in group.loaded()
    group.registry._unpin("kept", "")


async def test_a_full_disk_evicts_unused_copies(group: Group) -> None:
    with group.lease("prompt-1") as lease:
        await lease.take()
        await group.use("prompt-2", "adapter-1")
        group.library.max_copies = 3
        assert await group.use(adapter_id="adapter-2") == ["a2"]
        await group.settle()
        assert group.loaded() == {"p1", "a2"}


async def test_copies_of_refused_adapters_are_removed(group: Group) -> None:
    group.library.put(adapter("huge", num_bytes=9 * 1024), "huge")
    group.library.store[PROMPT, "adapter-2"] = adapter("a2")
    for prefix_id, adapter_id in (("adapter-2", "adapter-1"), (None, "huge")):
        with pytest.raises(RequestError):
            await group.use(prefix_id, adapter_id)
    await group.settle()
    assert set(group.library.copies) == {"a1"}
