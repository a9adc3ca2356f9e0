"""Decides which soft prompts and LoRA adapters the shards keep loaded. For each kind, these are the adapters
that live calls use and, as memory allows, the most recently used others. All ranks keep the same adapters."""

import asyncio
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import grpc

from tgis.pb import shard_pb2 as pb
from tgis.router.errors import OVERLOADED, OverloadedError, UnavailableError
from tgis.router.metrics.metrics import AdapterMetrics, Metrics
from tgis.router.sequence import AdapterInfo, AdapterKind
from tgis.router.shards.client import LOST, RETRY_INTERVAL_S, AdapterCallError, ShardClient, ShardsLostError

logger = logging.getLogger(__name__)

T = TypeVar("T")

LIMITS_S = {AdapterKind.SOFT_PROMPT: 5.0, AdapterKind.LORA: 60.0}
"""Time limit that applies separately to a look-up, a wait for memory and a load."""
# Time after which a call gives up if only this call has noticed a loss. The router's checks notice a hang
# within 15 s and a network failure within 30 s.
UNNOTICED_S = 60.0
MAX_RESTORES = 4  # concurrency limit of loads when the shards are back


@dataclass(eq=False)
class AdapterEntry:
    """Adapter that the shards are loading, have loaded or are unloading."""

    info: AdapterInfo
    num_references: int = 0
    has_room: bool = False
    """True if its bytes count as used, from before it is loaded until it is unloaded."""
    is_loaded: bool = False
    loading: "asyncio.Task[None]" = field(init=False)
    unloading: "asyncio.Task[None]" = field(init=False)


class AdapterCache:
    """Adapters of one kind in the shards, and each shard's memory for them, in bytes."""

    def __init__(self, metrics: AdapterMetrics, limit_s: float) -> None:
        self.metrics = metrics
        self.limit_s = limit_s
        self.entries: OrderedDict[str, AdapterEntry] = OrderedDict()
        """Adapters that are loaded or being loaded, by digest, least recently used first."""
        self.unloading: set[AdapterEntry] = set()
        self.capacity = 0
        self.num_promised = 0
        """Bytes reserved for the adapter for which others are being evicted."""
        self.turn = asyncio.Lock()
        """Lock held by the adapter for which others are being evicted; waiters get it in order of arrival."""
        self.changed = asyncio.Event()
        metrics.entries.follow(lambda: sum(entry.is_loaded for entry in self.entries.values()))
        metrics.bytes.follow(lambda: self.num_staying_bytes + self.num_leaving_bytes)

    @property
    def num_staying_bytes(self) -> int:
        return sum(entry.info.num_bytes for entry in self.entries.values() if entry.has_room)

    @property
    def num_leaving_bytes(self) -> int:
        return sum(entry.info.num_bytes for entry in self.unloading if entry.has_room)

    @property
    def idle(self) -> list[AdapterEntry]:
        return [entry for entry in self.entries.values() if entry.is_loaded and not entry.num_references]

    def unloads(self, digest: str) -> list[asyncio.Task[None]]:
        """Return the unfinished unloads of this adapter."""
        return [entry.unloading for entry in self.unloading if entry.info.digest == digest]

    def choose_victims(self, num_bytes: int) -> list[AdapterEntry]:
        """Return the least recently used idle adapters that free this many bytes, or none if all of them free
        less."""
        victims: list[AdapterEntry] = []
        for entry in self.idle:
            if num_bytes <= 0:
                break
            victims.append(entry)
            num_bytes -= entry.info.num_bytes
        return victims if num_bytes <= 0 else []


class AdapterResidency:
    """Owner of the adapters in the shards. It connects to the shards and restores their adapters after a
    loss."""

    def __init__(
        self, shards: ShardClient, metrics: Metrics, limits_s: Mapping[AdapterKind, float] = LIMITS_S
    ) -> None:
        self.shards = shards
        self.caches = {
            AdapterKind.SOFT_PROMPT: AdapterCache(metrics.prompts, limits_s[AdapterKind.SOFT_PROMPT]),
            AdapterKind.LORA: AdapterCache(metrics.adapters, limits_s[AdapterKind.LORA]),
        }
        self._decided = asyncio.Event()  # set while the shards are connected or considered lost
        self._given_up = False
        self._num_losses = 0

    @property
    def num_references(self) -> int:
        return sum(entry.num_references for entry in self._all_entries())

    def has(self, info: AdapterInfo) -> bool:
        """Return whether an adapter is loaded, or will be loaded again before the next step."""
        entry = self.caches[info.kind].entries.get(info.digest)
        return entry is not None and entry.info is info and entry.is_loaded

    async def connect(self) -> pb.InfoResponse:
        """Wait until the shards are connected and have exactly the adapters in use. If an adapter cannot be
        loaded again, log it; `has` then returns False for it."""
        self._suspend()
        while True:
            info = await self.shards.connect()
            self.caches[AdapterKind.SOFT_PROMPT].capacity = info.prompt_cache_bytes
            self.caches[AdapterKind.LORA].capacity = info.adapter_cache_bytes
            try:
                await self._restore()
            except ShardsLostError:
                await asyncio.sleep(RETRY_INTERVAL_S)
                continue
            self._given_up = False
            self._decided.set()
            return info

    def give_up(self) -> None:
        """Fail all calls that wait for the shards, until the shards are connected again."""
        self._given_up = True
        self._decided.set()

    async def ask(self, call: Callable[[], Awaitable[T]]) -> T:
        """Call the shards, and retry the call if they are lost. Raises UnavailableError and the errors of
        `call`."""
        lost_at = math.inf
        while True:
            await self._decided.wait()
            if self._given_up or time.monotonic() - lost_at > UNNOTICED_S:
                raise UnavailableError(LOST)
            num_losses = self._num_losses
            try:
                answer = await call()
                if num_losses == self._num_losses:
                    return answer
            except ShardsLostError:
                lost_at = min(lost_at, time.monotonic())
                await asyncio.sleep(RETRY_INTERVAL_S)
            if num_losses != self._num_losses:
                lost_at = math.inf

    async def take(
        self, info: AdapterInfo, copy_again: Callable[[], Awaitable[bool]], began: float
    ) -> AdapterEntry:
        """Add a reference to an adapter, and return its entry once it is loaded. `copy_again` copies the
        adapter's files again, and returns False if it cannot; `began` is the start time of the look-up.
        Raises OverloadedError if memory stays full for too long, AdapterCallError and UnavailableError."""
        cache = self.caches[info.kind]
        entry = cache.entries.get(info.digest)
        if entry is None:
            entry = cache.entries[info.digest] = AdapterEntry(info)
            entry.loading = asyncio.create_task(self._load(entry, copy_again, began), name="load")
        (cache.metrics.hits if entry.is_loaded else cache.metrics.misses).add()
        entry.num_references += 1
        try:
            # Shielded, because other calls may wait for the load when this call is cancelled.
            await asyncio.shield(entry.loading)
        except BaseException:
            self.release(entry)
            raise
        return entry

    def release(self, entry: AdapterEntry) -> None:
        entry.num_references -= 1
        assert entry.num_references >= 0, "released too often"
        digest = entry.info.digest
        cache = self.caches[entry.info.kind]
        if entry.num_references or cache.entries.get(digest) is not entry:
            return
        if entry.has_room:
            cache.entries.move_to_end(digest)
            cache.changed.set()
        else:  # adapters behind it in the queue must not wait for a load that is no longer needed
            self._unload([entry])
            entry.loading.cancel()

    def forget(self, info: AdapterInfo) -> None:
        """Discard the copy of an adapter that will not be loaded."""
        cache = self.caches[info.kind]
        if info.digest not in cache.entries and not cache.unloads(info.digest):
            self._unload([AdapterEntry(info)])

    async def drop_idle(self) -> bool:
        """Unload all adapters without references. Return False if there are none."""
        idle = [entry for cache in self.caches.values() for entry in cache.idle]
        if idle:
            await asyncio.shield(self._evict(idle))
        return bool(idle)

    async def _load(
        self, entry: AdapterEntry, copy_again: Callable[[], Awaitable[bool]], began: float
    ) -> None:
        digest = entry.info.digest
        cache = self.caches[entry.info.kind]
        load = partial(self.shards.load, digest, cache.limit_s)
        try:
            while unloads := cache.unloads(digest):  # an unload must not overtake the load
                await asyncio.wait(unloads)
            await self._make_room(entry, cache)
            try:
                await self.ask(load)
            except AdapterCallError as error:
                # An eviction removed the copy after the look-up. It cannot remove the new copy.
                if error.code is not grpc.StatusCode.NOT_FOUND or not await copy_again():
                    raise
                await self.ask(load)
        except BaseException:
            if cache.entries.get(digest) is entry:
                self._unload([entry])
            raise
        entry.is_loaded = True
        cache.changed.set()
        cache.metrics.load_duration.observe(time.monotonic() - began)

    async def _make_room(self, entry: AdapterEntry, cache: AdapterCache) -> None:
        num_bytes = entry.info.num_bytes
        taken = cache.num_staying_bytes + max(cache.num_leaving_bytes, cache.num_promised)
        if taken + num_bytes > cache.capacity:  # otherwise it need not queue behind larger adapters
            await self.ask(partial(self._wait_for_room, num_bytes, cache))
        entry.has_room = True

    async def _wait_for_room(self, num_bytes: int, cache: AdapterCache) -> None:
        try:
            async with asyncio.timeout(cache.limit_s), cache.turn:
                await self._evict_for(num_bytes, cache)
        except TimeoutError:
            await self.shards.check_alive()
            raise OverloadedError(OVERLOADED) from None

    async def _evict_for(self, num_bytes: int, cache: AdapterCache) -> None:
        """Evict adapters as they become idle, until this many bytes are free."""
        try:
            while (
                excess := cache.num_staying_bytes + num_bytes - cache.capacity
            ) + cache.num_leaving_bytes > 0:
                cache.changed.clear()
                if victims := cache.choose_victims(excess):
                    cache.num_promised = num_bytes
                    self._evict(victims)
                await cache.changed.wait()
        finally:
            cache.num_promised = 0

    def _evict(self, entries: Sequence[AdapterEntry]) -> asyncio.Task[None]:
        for entry in entries:
            self.caches[entry.info.kind].metrics.evictions.add()
        return self._unload(entries)

    def _unload(self, entries: Sequence[AdapterEntry]) -> asyncio.Task[None]:
        """Remove adapters from the table now, and from the shards in the background."""
        task = asyncio.create_task(self._unload_from_shards(entries), name="unload")
        for entry in entries:
            cache = self.caches[entry.info.kind]
            cache.entries.pop(entry.info.digest, None)
            cache.unloading.add(entry)
            entry.unloading = task
        return task

    async def _unload_from_shards(self, entries: Sequence[AdapterEntry]) -> None:
        try:
            # Steps in flight may still open rows of ended calls, so wait for them on all ranks.
            await self.shards.settle()
            await self.shards.unload([entry.info.digest for entry in entries])
        except ShardsLostError:
            logger.info("the shards were lost while unloading adapters")
        except AdapterCallError:
            logger.exception("the shards could not unload adapters")
        finally:
            for cache in self.caches.values():
                cache.unloading.difference_update(entries)
                cache.changed.set()

    def _suspend(self) -> None:
        """Record the loss of the shards. Adapters without references will not be loaded again."""
        self._num_losses += 1
        if not self._given_up:
            self._decided.clear()
        for cache in self.caches.values():
            for entry in cache.idle:
                del cache.entries[entry.info.digest]
            cache.changed.set()

    async def _restore(self) -> None:
        """Unload all other adapters from the shards, and load all loaded adapters again. Loads in progress
        retry by themselves, but their copies must be kept too."""
        try:
            await self.shards.unload([entry.info.digest for entry in self._all_entries()], others=True)
        except AdapterCallError:
            logger.exception("the shards could not unload the adapters of an earlier router")
        slots = asyncio.Semaphore(MAX_RESTORES)
        loaded = [entry for entry in self._all_entries() if entry.is_loaded]
        for entry in loaded:  # a reference prevents their eviction during the load
            entry.num_references += 1
        try:
            async with asyncio.TaskGroup() as group:
                for entry in loaded:
                    group.create_task(self._load_again(entry, slots))
        except ExceptionGroup as losses:
            raise losses.exceptions[0] from None
        finally:
            for entry in loaded:
                self.release(entry)

    async def _load_again(self, entry: AdapterEntry, slots: asyncio.Semaphore) -> None:
        digest = entry.info.digest
        kind = entry.info.kind
        async with slots:
            try:
                await self.shards.load(digest, self.caches[kind].limit_s)
            except AdapterCallError as error:
                logger.error("the %s %.16s could not be loaded again: %s", kind.label, digest, error)
                self._unload([entry])

    def _all_entries(self) -> list[AdapterEntry]:
        return [entry for cache in self.caches.values() for entry in cache.entries.values()]
