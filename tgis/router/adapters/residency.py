"""Decides which soft prompts and LoRA adapters the shards keep loaded: as many bytes of each kind as they
have room for. These are always the ones that live calls refer to, and of the others the most recently used.
All ranks keep the same ones."""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import grpc

from tgis.pb import shard_pb2 as pb
from tgis.router.errors import OVERLOADED, OverloadedError, UnavailableError
from tgis.router.metrics.metrics import ContentMetrics, Metrics
from tgis.router.sequence import AdapterInfo, AdapterKind
from tgis.router.shards.client import LOST, RETRY_INTERVAL_S, AdapterCallError, ShardClient, ShardsLostError

logger = logging.getLogger(__name__)

T = TypeVar("T")

LIMITS_S = {AdapterKind.SOFT_PROMPT: 5.0, AdapterKind.LORA: 60.0}
"""Time limits of a look-up, of a wait for room and of a load, each."""
MAX_TRIES = 50  # tries of a call that fails with losses that nothing else notices
MAX_RESTORES = 4  # concurrent loads when the shards are back


@dataclass(eq=False)
class AdapterEntry:
    """Adapter that the shards load, have loaded or unload."""

    info: AdapterInfo
    num_references: int = 0
    has_room: bool = False
    """True from before it is loaded: its bytes count until it is unloaded."""
    is_loaded: bool = False
    loading: "asyncio.Task[None]" = field(init=False)
    unloading: "asyncio.Task[None]" = field(init=False)

    @property
    def is_idle(self) -> bool:
        return self.is_loaded and not self.num_references


@dataclass(eq=False)
class MemoryBudget:
    """Memory that each shard has for adapters of one kind, in bytes, and the order of those that wait for
    it."""

    metrics: ContentMetrics
    limit_s: float
    capacity: int = 0
    num_promised: int = 0
    """Bytes promised to the adapter that others are being evicted for."""
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Lock of the adapter that others are being evicted for: first come, first served."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class AdapterResidency:
    """Owner of the adapters in the shards. It connects to the shards and restores the adapters after a
    loss."""

    def __init__(
        self, shards: ShardClient, metrics: Metrics, limits_s: Mapping[AdapterKind, float] = LIMITS_S
    ) -> None:
        self.shards = shards
        self.budgets = {
            AdapterKind.SOFT_PROMPT: MemoryBudget(metrics.prompts, limits_s[AdapterKind.SOFT_PROMPT]),
            AdapterKind.LORA: MemoryBudget(metrics.adapters, limits_s[AdapterKind.LORA]),
        }
        self._entries: OrderedDict[str, AdapterEntry] = OrderedDict()  # by digest, least recently used first
        self._unloading: set[AdapterEntry] = set()
        self._decided = asyncio.Event()  # set when the shards are connected or given up
        self._given_up = False
        self._num_losses = 0
        for kind, budget in self.budgets.items():
            budget.metrics.entries.follow(partial(self._count_loaded, kind))
            budget.metrics.bytes.follow(partial(self._count_used_bytes, kind))

    @property
    def num_references(self) -> int:
        return sum(entry.num_references for entry in self._entries.values())

    def has(self, info: AdapterInfo) -> bool:
        """Return whether an adapter is loaded, or will be again before the shards compute anything."""
        entry = self._entries.get(info.digest)
        return entry is not None and entry.info is info and entry.is_loaded

    async def connect(self) -> pb.InfoResponse:
        """Wait until the shards are connected and have loaded what is referred to and nothing else. An
        adapter that cannot be loaded again is logged, and `has` returns False for it."""
        self._suspend()
        while True:
            info = await self.shards.connect()
            self.budgets[AdapterKind.SOFT_PROMPT].capacity = info.prompt_cache_bytes
            self.budgets[AdapterKind.LORA].capacity = info.adapter_cache_bytes
            try:
                await self._restore()
            except ShardsLostError:
                await asyncio.sleep(RETRY_INTERVAL_S)
                continue
            self._given_up = False
            self._decided.set()
            return info

    def give_up(self) -> None:
        """Tell all that wait for the shards that they are lost, until they are connected again."""
        self._given_up = True
        self._decided.set()

    async def ask(self, call: Callable[[], Awaitable[T]]) -> T:
        """Call the shards, and call again after a loss of them. Raises UnavailableError, and everything that
        `call` raises."""
        for _ in range(MAX_TRIES):
            await self._decided.wait()
            if self._given_up:
                break
            num_losses = self._num_losses
            try:
                answer = await call()
                if num_losses == self._num_losses:
                    return answer
            except ShardsLostError:
                await asyncio.sleep(RETRY_INTERVAL_S)
        raise UnavailableError(LOST)

    async def take(
        self, info: AdapterInfo, copy_again: Callable[[], Awaitable[bool]], began: float
    ) -> AdapterEntry:
        """Take a reference to the adapter with this digest, and return its entry once it is loaded.
        `copy_again` copies the same content once more, and returns False if it cannot. `began` is the time at
        which the look-up began.

        Raises OverloadedError if there is no room for too long, AdapterCallError and UnavailableError."""
        entry, metrics = self._entries.get(info.digest), self.budgets[info.kind].metrics
        if entry is None:
            entry = self._entries[info.digest] = AdapterEntry(info)
            entry.loading = asyncio.create_task(self._load(entry, copy_again, began), name="load")
        (metrics.hits if entry.is_loaded else metrics.misses).add()
        entry.num_references += 1
        try:
            # Others that wait for it still want it when this call is cancelled.
            await asyncio.shield(entry.loading)
        except BaseException:
            self.release(entry)
            raise
        return entry

    def release(self, entry: AdapterEntry) -> None:
        """Give up a reference."""
        entry.num_references -= 1
        assert entry.num_references >= 0, "released too often"
        if entry.num_references or self._entries.get(entry.info.digest) is not entry:
            return
        if entry.has_room:
            self._entries.move_to_end(entry.info.digest)
            self.budgets[entry.info.kind].changed.set()
        else:  # those behind it need not wait for what nobody wants any more
            self._unload([entry])
            entry.loading.cancel()

    def forget(self, info: AdapterInfo) -> None:
        """Discard the copy of an adapter that was found but will not be loaded."""
        if info.digest not in self._entries and not self._unloads(info.digest):
            self._unload([AdapterEntry(info)])

    async def drop_idle(self) -> bool:
        """Unload all adapters that nothing refers to. Return False if there are none."""
        idle = [entry for entry in self._entries.values() if entry.is_idle]
        if idle:
            await asyncio.shield(self._evict(idle))
        return bool(idle)

    async def _load(
        self, entry: AdapterEntry, copy_again: Callable[[], Awaitable[bool]], began: float
    ) -> None:
        digest, budget = entry.info.digest, self.budgets[entry.info.kind]
        load = partial(self.shards.load, digest, budget.limit_s)
        try:
            while unloads := self._unloads(digest):  # an unload must not overtake the load
                await asyncio.wait(unloads)
            await self._make_room(entry, budget)
            try:
                await self.ask(load)
            except AdapterCallError as error:
                # An eviction removed the copy after the look-up. It cannot remove the new copy meanwhile.
                if error.code is not grpc.StatusCode.NOT_FOUND or not await copy_again():
                    raise
                await self.ask(load)
        except BaseException:
            if self._entries.get(digest) is entry:
                self._unload([entry])
            raise
        entry.is_loaded = True
        budget.changed.set()
        budget.metrics.load_duration.observe(time.monotonic() - began)

    async def _make_room(self, entry: AdapterEntry, budget: MemoryBudget) -> None:
        staying, leaving = self._count_bytes(entry.info.kind)
        # An adapter that fits need not wait for others that wait for more room than there is.
        if staying + max(leaving, budget.num_promised) + entry.info.num_bytes > budget.capacity:
            try:
                async with asyncio.timeout(budget.limit_s), budget.turn:
                    await self._evict_for(entry.info, budget)
            except TimeoutError:
                raise OverloadedError(OVERLOADED) from None
        entry.has_room = True

    async def _evict_for(self, info: AdapterInfo, budget: MemoryBudget) -> None:
        """Evict others until this adapter fits, as soon as nobody needs them."""
        try:
            while True:
                staying, leaving = self._count_bytes(info.kind)
                excess = staying + info.num_bytes - budget.capacity
                if excess + leaving <= 0:
                    return
                budget.changed.clear()
                if victims := self._choose_victims(info.kind, excess):
                    budget.num_promised = info.num_bytes
                    self._evict(victims)
                await budget.changed.wait()
        finally:
            budget.num_promised = 0

    def _count_bytes(self, kind: AdapterKind) -> tuple[int, int]:
        """Return the bytes of the adapters that stay, and of those that are being unloaded."""

        def count(entries: Iterable[AdapterEntry]) -> int:
            return sum(each.info.num_bytes for each in entries if each.has_room and each.info.kind is kind)

        return count(self._entries.values()), count(self._unloading)

    def _count_used_bytes(self, kind: AdapterKind) -> int:
        return sum(self._count_bytes(kind))

    def _count_loaded(self, kind: AdapterKind) -> int:
        return sum(entry.is_loaded and entry.info.kind is kind for entry in self._entries.values())

    def _choose_victims(self, kind: AdapterKind, num_bytes: int) -> list[AdapterEntry]:
        """Return idle adapters that together free this room, least recently used first; none if they cannot
        free all of it."""
        victims: list[AdapterEntry] = []
        for entry in self._entries.values():
            if num_bytes <= 0:
                break
            if entry.is_idle and entry.info.kind is kind:
                victims.append(entry)
                num_bytes -= entry.info.num_bytes
        return victims if num_bytes <= 0 else []

    def _evict(self, entries: Sequence[AdapterEntry]) -> asyncio.Task[None]:
        for entry in entries:
            self.budgets[entry.info.kind].metrics.evictions.add()
        return self._unload(entries)

    def _unload(self, entries: Sequence[AdapterEntry]) -> asyncio.Task[None]:
        """Remove adapters from the table at once, and from the shards soon."""
        task = asyncio.create_task(self._unload_from_shards(entries), name="unload")
        for entry in entries:
            self._entries.pop(entry.info.digest, None)
            self._unloading.add(entry)
            entry.unloading = task
        return task

    def _unloads(self, digest: str) -> list[asyncio.Task[None]]:
        """Return the unloads of this adapter that have not ended."""
        return [entry.unloading for entry in self._unloading if entry.info.digest == digest]

    async def _unload_from_shards(self, entries: Sequence[AdapterEntry]) -> None:
        try:
            # Steps in flight may still open rows of calls that have ended, on all ranks or on none.
            await self.shards.settle()
            await self.shards.unload([entry.info.digest for entry in entries])
        except ShardsLostError:
            logger.info("the shards were lost while they unloaded adapters")
        except AdapterCallError:
            logger.exception("the shards could not unload adapters")
        finally:
            self._unloading.difference_update(entries)
            for entry in entries:
                self.budgets[entry.info.kind].changed.set()

    def _suspend(self) -> None:
        """Note the loss of the shards. Adapters that nothing refers to will not be loaded again."""
        self._num_losses += 1
        if not self._given_up:
            self._decided.clear()
        for entry in [entry for entry in self._entries.values() if entry.is_idle]:
            del self._entries[entry.info.digest]
            self.budgets[entry.info.kind].changed.set()

    async def _restore(self) -> None:
        """Unload leftovers, and load all loaded adapters again. Those that were just being loaded load
        themselves, but their copies must stay too."""
        try:
            await self.shards.unload(list(self._entries), others=True)
        except AdapterCallError:
            logger.exception("the shards could not unload the adapters of an earlier router")
        slots = asyncio.Semaphore(MAX_RESTORES)
        loaded = [entry for entry in self._entries.values() if entry.is_loaded]
        for entry in loaded:  # they may not be evicted while they are loaded
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
        digest, kind = entry.info.digest, entry.info.kind
        async with slots:
            try:
                await self.shards.load(digest, self.budgets[kind].limit_s)
            except AdapterCallError as error:
                what = kind.name.lower()
                logger.error("the %s %.16s could not be loaded again and is lost: %s", what, digest, error)
                self._unload([entry])
