"""Check shards that hang or are lost during adapter lookups and loads: calls pause, and none is refused."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.router.adapter_group import LIMIT_S, Group, open_group
from tests.support.router.model_of_contents import Item
from tgis.router.adapters import residency
from tgis.router.errors import UnavailableError
from tgis.router.shards import client

pytestmark = pytest.mark.usefixtures("steady_clock")

ALIVE_S = 0.3
WATCH_S = LIMIT_S + 2 * ALIVE_S  # until the launcher would notice a hanging shard
NUM_CALLS = 9


@pytest.fixture
async def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Group]:
    monkeypatch.setattr(client, "ALIVE_TIMEOUT_S", ALIVE_S)
    async with open_group(tmp_path) as group:
        yield group


async def restart(group: Group) -> None:
    group.stop()
    group.serve(epoch=2)
    await group.residency.connect()


@pytest.mark.parametrize(
    ("rank", "method"),
    [
        (0, "Find"),
        (1, "Load"),
        (1, "Put"),
        pytest.param(0, "Load", marks=pytest.mark.slow),
        pytest.param(0, "Fetch", marks=pytest.mark.slow),
        pytest.param(1, "Unload", marks=pytest.mark.slow),
    ],
)
async def test_a_shard_that_hangs_is_a_pause(group: Group, rank: int, method: str) -> None:
    if method == "Unload":
        await asyncio.gather(*(group.use(f"prompt-{i}") for i in (1, 2, 3)))
    elif method in ("Fetch", "Put"):
        group.library.elsewhere[1] = {"p4"}
    group.shards[rank].hangs_from = method
    calls = [asyncio.create_task(group.use("prompt-4", "adapter-4")) for _ in range(NUM_CALLS)]
    await asyncio.sleep(WATCH_S)
    assert not group.shards[rank].runs.is_set()
    assert not any(call.done() for call in calls)
    await restart(group)
    assert await asyncio.gather(*calls) == [["a4", "p4"]] * NUM_CALLS


@pytest.mark.slow
async def test_calls_keep_waiting_for_a_hanging_lookup(group: Group) -> None:
    """Check more calls than concurrent lookups, so that some are still queued when the hang is detected."""
    group.library.store.clear()
    for i in range(40):
        group.library.put(Item(f"x{i}", num_bytes=10), f"many-{i}")
    group.shards[0].hangs_from = "Find"
    calls = [asyncio.create_task(group.use(f"many-{i}")) for i in range(40)]
    await asyncio.sleep(2 * WATCH_S)
    assert not any(call.done() for call in calls)
    await restart(group)
    assert await asyncio.gather(*calls) == [[f"x{i}"] for i in range(40)]


@pytest.mark.slow
async def test_an_adapter_in_use_is_loaded_again_after_a_second_hang(group: Group) -> None:
    """Check replacement shards that hang as well, while they load the adapters in use."""
    with group.lease("prompt-1") as lease:
        adapters = await lease.take()
        group.stop()
        group.serve(epoch=2)
        group.shards[1].hangs_from = "Load"
        connecting = asyncio.create_task(group.residency.connect())
        await asyncio.sleep(WATCH_S)
        assert not connecting.done()
        group.stop()
        group.serve(epoch=3)
        await connecting
        assert [group.residency.has(info) for info in adapters.present] == [True]
    assert group.loaded() == {"p1"}


@pytest.mark.slow
async def test_an_unnoticed_loss_ends_the_call(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the pause's limit, which leaves the launcher time to react and restarts with every loss."""
    monkeypatch.setattr(residency, "UNNOTICED_S", 1.0)
    loop = asyncio.get_running_loop()
    group.stop()
    call, began = asyncio.create_task(group.use("prompt-1")), loop.time()
    with pytest.raises(UnavailableError):
        await call
    assert 1.0 <= loop.time() - began < 1.0 + LIMIT_S + 1
    call = asyncio.create_task(group.use("prompt-1"))
    await asyncio.sleep(0.7)
    group.serve(epoch=2)
    await group.residency.connect()
    group.stop()
    await asyncio.sleep(0.7)
    assert not call.done()
    group.serve(epoch=3)
    await group.residency.connect()
    assert await call == ["p1"]
