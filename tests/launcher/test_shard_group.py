"""Number of restarts of a group of shards, on one or two nodes whose shards end according to a script."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from tgis.launcher import shard_group
from tgis.launcher.child_configs import Start
from tgis.launcher.nodes import local_node as node
from tgis.launcher.nodes.local_node import ShardEndedError, first_end, run_unless_ended
from tgis.launcher.plan import LaunchError
from tgis.launcher.shard_group import ShardGroup
from tgis.net.addresses import TcpAddress
from tgis.process.child import End

pytestmark = pytest.mark.usefixtures("steady_clock")

KILLED, REFUSED, LOST = End("killed"), End("refused", is_refusal=True), End("the node is lost")


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_group, "FIRST_BACKOFF_S", 0.0)
    for module in (shard_group, node):
        monkeypatch.setattr(module, "SETTLE_S", 0.1)


@contextmanager
def rendezvous(epoch: int) -> Iterator[tuple[str, int | None]]:
    yield f"{epoch}", None


class Node:
    """Node whose starts follow a script: an end before its shards have loaded; or None, and then an end after
    they have. After the script, they load and stay."""

    addresses: Sequence[TcpAddress] = ()

    def __init__(self, *script: End | None, delay_s: float = 0.0) -> None:
        """`delay_s` passes before the end of the shards is noticed."""
        self.script, self.delay_s, self.num_starts, self.num_losses = list(script), delay_s, 0, 0
        self._end: asyncio.Future[End] | None = None
        self.stays = asyncio.Event()

    async def wait_until_connected(self) -> None:
        pass

    async def start(self, start: Start, listener: int | None) -> None:
        self.num_starts += 1
        self._end = asyncio.get_running_loop().create_future()
        if self.script and (end := self.script.pop(0)) is not None:
            self._finish(self._end, end)
            await run_unless_ended(asyncio.Event().wait(), self.wait())
        elif self.script and (end := self.script.pop(0)) is not None:
            self._finish(self._end, end)
        else:
            self.stays.set()

    def _finish(self, future: "asyncio.Future[End]", end: End) -> None:
        self.num_losses += end is LOST
        asyncio.get_running_loop().call_later(self.delay_s, future.set_result, end)

    async def wait(self) -> End:
        assert self._end is not None
        return await asyncio.shield(self._end)

    async def kill(self) -> None:
        pass


async def run(*nodes: Node) -> str:
    """Return the end of the group."""
    with pytest.raises(LaunchError) as caught:
        await asyncio.wait_for(ShardGroup(nodes, rendezvous, None).run(), 20)  # type: ignore[arg-type]
    return str(caught.value)


async def serve(*nodes: Node) -> None:
    """Return when all of them stay."""
    running = asyncio.create_task(ShardGroup(nodes, rendezvous, None).run())  # type: ignore[arg-type]
    await asyncio.wait_for(asyncio.gather(*(node.stays.wait() for node in nodes)), 20)
    assert not running.done()
    running.cancel()


async def test_three_kills_before_the_first_readiness_are_borne() -> None:
    survivor, victim = Node(KILLED, KILLED, KILLED), Node(KILLED, KILLED, KILLED, KILLED)
    await serve(survivor)
    assert survivor.num_starts == 4
    assert await run(victim) == "killed; giving up after 3 restarts of the shards"
    assert victim.num_starts == 4


async def test_a_rank_that_reported_its_cause_is_not_asked_again() -> None:
    for script in ((REFUSED,), (KILLED, REFUSED)):
        shards = Node(*script)
        assert await run(shards) == "refused"
        assert shards.num_starts == len(script)


async def test_after_the_first_readiness_all_ends_count_alike() -> None:
    """Earlier crashes do not count."""
    shards = Node(KILLED, KILLED, None, KILLED, REFUSED, *[KILLED] * 5)
    assert await run(shards) == "killed; giving up after 6 restarts of the shards"
    assert shards.num_starts == 9


async def test_a_rank_that_is_left_alone_is_not_to_blame() -> None:
    """The shard ends with a line, which arrives before the end of the one killed on the other node."""
    alone, killed = Node(REFUSED), Node(KILLED, delay_s=0.05)
    await serve(alone, killed)
    assert (alone.num_starts, killed.num_starts) == (2, 2)


async def test_the_first_start_has_a_limit_of_time() -> None:
    """Crashes count over all attempts, until the shards have loaded once."""
    never, slow, loaded = Node(KILLED, delay_s=9), Node(KILLED, KILLED, KILLED, delay_s=0.2), Node()
    for shards in (never, slow):
        group = ShardGroup([shards], rendezvous, None, startup_timeout=0.5)  # type: ignore[list-item]
        with pytest.raises(LaunchError) as caught:
            await asyncio.wait_for(group.run(), 5)
        assert str(caught.value) == "the model was not loaded within 0.5 s: see --startup-timeout"
    assert (never.num_starts, slow.num_starts > 1) == (1, True)
    group = ShardGroup([loaded], rendezvous, None, startup_timeout=0.1)  # type: ignore[list-item]
    running = asyncio.create_task(group.run())
    await asyncio.sleep(0.3)
    assert not running.done()
    running.cancel()


async def test_a_node_that_goes_and_comes_does_not_count() -> None:
    gone = Node(*[LOST] * 6, KILLED, KILLED, KILLED)
    await serve(gone)
    assert gone.num_starts == 10


async def after(seconds: float, end: End) -> End:
    await asyncio.sleep(seconds)
    return end


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ([(0.0, REFUSED), (0.02, KILLED)], KILLED),
        ([(0.0, REFUSED), (9.0, KILLED)], REFUSED),
        ([(0.0, KILLED), (0.0, REFUSED)], KILLED),
        ([(0.0, REFUSED), (0.02, End("also", is_refusal=True))], REFUSED),
        ([(0.0, REFUSED)], REFUSED),
    ],
)
async def test_a_killed_rank_is_the_reported_cause(ends: list[tuple[float, End]], expected: End) -> None:
    assert await first_end(after(*end) for end in ends) is expected
    with pytest.raises(ShardEndedError, match=expected.text):
        await run_unless_ended(asyncio.Event().wait(), first_end(after(*end) for end in ends))
