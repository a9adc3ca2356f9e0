"""Two ranks behind real sockets, and the router's adapter code for them, without a router."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager
from pathlib import Path

from tests.support.router.fake_shard import FakeShard, ShardServer
from tests.support.router.model_of_contents import Item, Library, adapter
from tgis.pb import shard_pb2 as pb
from tgis.router.adapters.registry import AdapterLease, AdapterRegistry
from tgis.router.adapters.residency import AdapterResidency
from tgis.router.metrics.metrics import MetricLimits, Metrics
from tgis.router.sequence import AdapterKind
from tgis.router.shards.client import ShardClient
from tgis.router.shards.link import UnixShardLink

LIMIT_S = 0.5
ROOM = 3  # number of items of each kind that fit
INFO = pb.InfoResponse(prompt_cache_bytes=ROOM * 1024, adapter_cache_bytes=ROOM * 1024)


class Group:
    def __init__(self, directory: Path) -> None:
        self.library, self.uds_path = Library(), str(directory / "shard")
        for i in range(9):
            self.library.put(Item(f"p{i}", num_decoder_tokens=i), f"prompt-{i}")
            self.library.put(adapter(f"a{i}"), f"adapter-{i}")
        self.serve()
        self.metrics = Metrics(MetricLimits(100, 99, 16))
        limits_s = {AdapterKind.SOFT_PROMPT: LIMIT_S, AdapterKind.LORA: LIMIT_S}
        self.link = ShardClient(UnixShardLink(self.uds_path, 2))
        self.residency = AdapterResidency(self.link, self.metrics, limits_s)
        self.registry = AdapterRegistry(self.residency, self.metrics)

    def serve(self, epoch: int = 1) -> None:
        self.shards = [FakeShard(rank, epoch, INFO, self.library, 2) for rank in range(2)]
        self.servers = [ShardServer(shard, self.uds_path) for shard in self.shards]

    def stop(self) -> None:
        for server in self.servers:
            server.stop()

    def lease(
        self, prefix_id: str | None = None, adapter_id: str | None = None
    ) -> AbstractContextManager[AdapterLease]:
        return self.registry.lease(prefix_id, adapter_id, "an-id")

    def limit(self, seconds: float) -> None:
        """Limit how long look-ups, loads and waits for room may take from now on."""
        for cache in self.residency.caches.values():
            cache.limit_s = seconds

    async def use(self, prefix_id: str | None = None, adapter_id: str | None = None) -> list[str]:
        """Return the digests that a call with these ids gets."""
        with self.lease(prefix_id, adapter_id) as lease:
            return [info.digest for info in (await lease.take()).present]

    def loaded(self) -> set[str]:
        """Return the loaded digests, which must be equal on all ranks."""
        first, second = (set(shard.shelf.loaded) for shard in self.shards)
        assert first == second
        return first

    async def settle(self) -> None:
        """Wait until no load or unload is in progress."""
        for _ in range(1000):
            names = {task.get_name() for task in asyncio.all_tasks()}
            if not names & {"load", "unload", "find"}:
                return
            await asyncio.sleep(0.01)
        raise AssertionError("never settles")


@asynccontextmanager
async def open_group(directory: Path) -> AsyncIterator[Group]:
    group = Group(directory)
    group.shards[1].shelf.loaded["of a killed run"] = Item("of a killed run")
    try:
        await group.registry.start()
        assert group.loaded() == set()
        yield group
        await group.settle()
        assert group.library.faults == []
        assert group.residency.num_references == 0
    finally:
        await group.link.close()
        group.stop()
