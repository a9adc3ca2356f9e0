"""Tests the recorder of cache events with random workloads of a pool, against what look-ups in it find."""

import asyncio
import random
from collections.abc import Hashable

import pytest

from tgis.router.scheduling.block_pool import BlockPool
from tgis.router.scheduling.cache_events import CacheChanges, CacheRecorder, StoredBlock
from tgis.router.scheduling.state_pool import StatePool
from tgis.router.sequence import CacheSalt

SIZE, VOCAB_SIZE, MAX_BLOCKS = 2, 3, 4
Path = tuple[int, ...]


def root(tenant: str = "", salt: bytes = b"", adapters: tuple[str, ...] = ()) -> Hashable:
    return "decoder", CacheSalt(tenant, salt), adapters, (), False, False


VISIBLE = [root(), root("a")]
HIDDEN = [root(salt=b"x"), root(adapters=("lora",)), ("encoder", CacheSalt(), (), (1,))]


class Follower:
    """Listener that knows only what it is told."""

    def __init__(self) -> None:
        self.blocks: dict[int, StoredBlock] = {}

    def __call__(self, changes: CacheChanges) -> None:
        if changes.is_cleared:
            self.blocks.clear()
        for block in changes.stored:
            assert block.name not in self.blocks
            self.blocks[block.name] = block
        for name in changes.removed:
            del self.blocks[name]

    def paths(self, tenant: str) -> set[Path]:
        """Return the prompts whose blocks are all there."""
        paths: dict[int, Path] = {}
        for name, block in sorted(self.blocks.items()):
            if block.tenant == tenant and (block.parent is None or block.parent in paths):
                before = () if block.parent is None else paths[block.parent]
                paths[name] = before + block.token_ids
        return set(paths.values())


def findable(pool: BlockPool, prefix: Hashable) -> set[Path]:
    """Return the prompts of whole blocks that a look-up finds, by looking up every one. If there are states,
    a prompt also needs a snapshot after it or after a longer one."""
    paths: set[Path] = set()
    ended: set[Path] = set()
    ends: list[Path] = [()]
    while ends:
        path = ends.pop()
        for first in range(VOCAB_SIZE):
            for second in range(VOCAB_SIZE):
                longer = (*path, first, second)
                blocks, name = pool.match(prefix, longer)
                if len(blocks) * SIZE == len(longer):
                    paths.add(longer)
                    ends.append(longer)
                    if pool.states is None or name in pool.states:
                        ended.add(longer)
    return {path for path in paths if any(each[: len(path)] == path for each in ended)}


class Workload:
    """Random prompts that take, publish and release blocks."""

    def __init__(self, seed: int, has_states: bool = False) -> None:
        self.random = random.Random(seed)
        states = StatePool(self.random.randint(1, 4), SIZE) if has_states else None
        self.pool = BlockPool(self.random.randint(4, 12), SIZE, states=states)
        self.running: list[list[int]] = []

    def step(self) -> None:
        choice = self.random.random()
        if choice < 0.02:
            self.pool.forget()
        elif choice < 0.03:
            self.pool = self.pool.renew(self.pool.num_blocks, SIZE)
            self.running.clear()
        elif self.running and choice < 0.4:
            self.pool.release(self.running.pop(self.random.randrange(len(self.running))))
        else:
            self._start()

    def _start(self) -> None:
        prefix = self.random.choice(VISIBLE + HIDDEN)
        num_blocks = self.random.randint(1, MAX_BLOCKS)
        tokens = [self.random.randrange(VOCAB_SIZE) for _ in range(num_blocks * SIZE)]
        cached, name = self.pool.match(prefix, tokens)
        blocks = self.pool.allocate(cached, num_blocks - len(cached))
        if blocks is None:
            return
        self.running.append(blocks)
        for i in range(len(cached), num_blocks):
            name = self.pool.publish(name, tokens[i * SIZE : (i + 1) * SIZE], blocks[i])
            self._publish_state(name)
        if prefix[0] == "encoder":  # type: ignore[index]
            self.pool.publish(name, [0], blocks[-1])  # a short block, as at the end of an encoder's input

    def _publish_state(self, name: Hashable) -> None:
        states = self.pool.states
        if states is not None and self.random.random() < 0.4:
            slot = states.take()
            assert slot is not None
            states.publish(name, slot)


@pytest.mark.parametrize("has_states", [False, True])
@pytest.mark.parametrize("first", range(0, 160, 40))
def test_a_listener_knows_what_look_ups_find(first: int, has_states: bool) -> None:
    for seed in range(first, first + 40):
        asyncio.run(follow(Workload(seed, has_states)))


async def follow(workload: Workload) -> None:
    recorder, followers = CacheRecorder(lambda: workload.pool), list[Follower]()
    for number in range(60):
        workload.step()
        if number in (10, 25):  # late listeners get what is there
            followers.append(Follower())
            recorder.add(followers[-1])
        if number == 45:
            recorder.discard(followers.pop(0))
        if workload.random.random() < 0.5:
            await asyncio.sleep(0)
            for follower in followers:
                for tenant, prefix in zip(("", "a"), VISIBLE, strict=True):
                    assert follower.paths(tenant) == findable(workload.pool, prefix)


def test_nothing_is_recorded_without_listeners() -> None:
    async def run() -> None:
        workload = Workload(0)
        recorder, follower = CacheRecorder(lambda: workload.pool), Follower()
        recorder.add(follower)
        recorder.discard(follower)
        assert workload.pool.listener is None
        for _ in range(20):
            workload.step()
        recorder.add(follower)
        assert follower.paths("") == findable(workload.pool, VISIBLE[0])

    asyncio.run(run())
