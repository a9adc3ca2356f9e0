"""Decides which soft prompts and LoRA adapters the shards keep loaded: as many bytes of each kind as they
have room for. These are always the ones that live calls refer to, and of the others the most recently used.
All ranks keep the same ones."""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

import grpc

from tgis.pb import shard_pb2 as pb
from tgis.router.adapters.shelf import Resident, Shelf
from tgis.router.errors import OVERLOADED, OverloadedError, UnavailableError
from tgis.router.metrics.metrics import Metrics
from tgis.router.sequence import Content, ContentKind
from tgis.router.shards.client import LOST, RETRY_INTERVAL_S, ContentCallError, Shards, ShardsLostError

logger = logging.getLogger(__name__)

T = TypeVar("T")

LIMITS_S = {ContentKind.PROMPT: 5.0, ContentKind.ADAPTER: 60.0}
"""Time limits of a look-up, of a wait for room and of a load, each."""
MAX_TRIES = 50  # tries of a call that fails with losses that nothing else notices
MAX_RESTORES = 4  # concurrent loads when the shards are back


class Residents:
    """Owner of the adapters in the shards. It connects to the shards and restores the adapters after a
    loss."""

    def __init__(
        self, shards: Shards, metrics: Metrics, limits_s: Mapping[ContentKind, float] = LIMITS_S
    ) -> None:
        self.shards = shards
        self._table: OrderedDict[str, Resident] = OrderedDict()  # by digest, least recently used first
        self._leaving: dict[str, asyncio.Task[None]] = {}
        self._shelves = {
            ContentKind.PROMPT: Shelf(metrics.prompts, limits_s[ContentKind.PROMPT]),
            ContentKind.ADAPTER: Shelf(metrics.adapters, limits_s[ContentKind.ADAPTER]),
        }
        self._decided = asyncio.Event()  # set when the shards are connected or given up
        self._given_up = False
        self._num_losses = 0
        for kind in ContentKind:
            self._show(kind)

    def _show(self, kind: ContentKind) -> None:
        shelf, table = self._shelves[kind], self._table
        shelf.metrics.entries.follow(
            lambda: sum(one.is_loaded for one in table.values() if one.content.kind is kind)
        )
        shelf.metrics.bytes.follow(lambda: shelf.num_bytes)

    @property
    def num_references(self) -> int:
        return sum(resident.num_references for resident in self._table.values())

    def capacity(self, kind: ContentKind) -> int:
        """Return the bytes that adapters of this kind may take."""
        return self._shelves[kind].capacity

    def limit_s(self, kind: ContentKind) -> float:
        return self._shelves[kind].limit_s

    def has(self, content: Content) -> bool:
        """Return whether an adapter is loaded, or will be again before the shards compute anything."""
        resident = self._table.get(content.digest)
        return resident is not None and resident.content is content and resident.is_loaded

    async def connect(self) -> pb.InfoResponse:
        """Wait until the shards are connected and have loaded what is referred to and nothing else. An
        adapter that cannot be loaded again is logged, and `has` returns False for it."""
        self._suspend()
        while True:
            info = await self.shards.connect()
            self._shelves[ContentKind.PROMPT].capacity = info.prompt_cache_bytes
            self._shelves[ContentKind.ADAPTER].capacity = info.adapter_cache_bytes
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
        self, content: Content, copy_again: Callable[[], Awaitable[bool]], began: float
    ) -> Resident:
        """Take a reference to the adapter with this content's digest, and return it once it is loaded.
        `copy_again` copies the same content once more, and returns False if it cannot. `began` is the time at
        which the look-up began.

        Raises OverloadedError if there is no room for too long, ContentCallError and UnavailableError."""
        resident, shelf = self._table.get(content.digest), self._shelves[content.kind]
        if resident is None:
            resident = self._table[content.digest] = Resident(content)
            resident.loading = asyncio.create_task(self._load(resident, copy_again, began), name="load")
        (shelf.metrics.hits if resident.is_loaded else shelf.metrics.misses).add()
        self.refer(resident)
        try:
            # Others that wait for it still want it when this call is cancelled.
            await asyncio.shield(resident.loading)
        except BaseException:
            self.release(resident)
            raise
        return resident

    def refer(self, resident: Resident) -> None:
        resident.num_references += 1

    def release(self, resident: Resident) -> None:
        resident.num_references -= 1
        assert resident.num_references >= 0, "released too often"
        if resident.num_references or self._table.get(resident.content.digest) is not resident:
            return
        if resident.has_room:
            self._table.move_to_end(resident.content.digest)
            self._shelves[resident.content.kind].changed.set()
        else:  # those behind it need not wait for what nobody wants any more
            self._leave([resident])
            resident.loading.cancel()

    def forget(self, content: Content) -> None:
        """Discard the copy of an adapter that was found but will not be loaded."""
        if content.digest not in self._table and content.digest not in self._leaving:
            self._discard([Resident(content)])

    async def drop_idle(self) -> bool:
        """Unload all adapters that nothing refers to. Return False if there are none."""
        idle = [resident for resident in self._table.values() if resident.is_idle]
        if idle:
            await asyncio.shield(self._evict(idle))
        return bool(idle)

    async def _load(
        self, resident: Resident, copy_again: Callable[[], Awaitable[bool]], began: float
    ) -> None:
        digest, shelf = resident.content.digest, self._shelves[resident.content.kind]
        try:
            while digest in self._leaving:  # an unload must not overtake the load
                await asyncio.shield(self._leaving[digest])
            await self._make_room(resident)
            try:
                await self.ask(lambda: self.shards.load(digest, shelf.limit_s))
            except ContentCallError as error:
                # An eviction removed the copy after the look-up. It cannot remove the new copy meanwhile.
                if error.code is not grpc.StatusCode.NOT_FOUND or not await copy_again():
                    raise
                await self.ask(lambda: self.shards.load(digest, shelf.limit_s))
        except BaseException:
            if self._table.get(digest) is resident:
                self._leave([resident])
            raise
        resident.is_loaded = True
        shelf.changed.set()
        shelf.metrics.load_duration.observe(time.monotonic() - began)

    async def _make_room(self, resident: Resident) -> None:
        shelf = self._shelves[resident.content.kind]
        if shelf.fits(resident.content.num_bytes):  # even if others wait for more room than there is
            shelf.add(resident)
            return
        try:
            async with asyncio.timeout(shelf.limit_s), shelf.turn:
                await self._clear(shelf, resident.content)
                shelf.add(resident)
        except TimeoutError:
            raise OverloadedError(OVERLOADED) from None

    async def _clear(self, shelf: Shelf, content: Content) -> None:
        """Evict others until the content fits, as soon as nobody needs them."""
        try:
            while (excess := shelf.num_bytes + content.num_bytes - shelf.capacity) > 0:
                shelf.changed.clear()
                if victims := self._choose_victims(content.kind, excess - shelf.num_leaving):
                    shelf.num_promised = content.num_bytes
                    self._evict(victims)
                await shelf.changed.wait()
        finally:
            shelf.num_promised = 0

    def _choose_victims(self, kind: ContentKind, num_bytes: int) -> list[Resident]:
        """Return idle adapters that together free this room, least recently used first; none if they cannot
        free all of it."""
        victims: list[Resident] = []
        for resident in self._table.values():
            if num_bytes <= 0:
                break
            if resident.is_idle and resident.content.kind is kind:
                victims.append(resident)
                num_bytes -= resident.content.num_bytes
        return victims if num_bytes <= 0 else []

    def _evict(self, residents: Sequence[Resident]) -> asyncio.Task[None]:
        for resident in residents:
            self._shelves[resident.content.kind].metrics.evictions.add()
        return self._leave(residents)

    def _leave(self, residents: Sequence[Resident]) -> asyncio.Task[None]:
        """Remove adapters from the table at once, and unload them soon."""
        for resident in residents:
            del self._table[resident.content.digest]
            resident.is_loaded = False
        return self._discard(residents)

    def _discard(self, residents: Sequence[Resident]) -> asyncio.Task[None]:
        task = asyncio.create_task(self._unload(residents), name="unload")
        for resident in residents:
            self._leaving[resident.content.digest] = task
            if resident.has_room:
                self._shelves[resident.content.kind].num_leaving += resident.content.num_bytes
        return task

    async def _unload(self, residents: Sequence[Resident]) -> None:
        digests = [resident.content.digest for resident in residents]
        try:
            # Steps in flight may still open rows of calls that have ended, on all ranks or on none.
            await self.shards.settle()
            await self.shards.unload(digests)
        except ShardsLostError:
            logger.info("unloading ends with the loss of the shards")
        except ContentCallError:
            logger.exception("the shards do not unload what they are told to")
        finally:
            for resident in residents:
                shelf = self._shelves[resident.content.kind]
                del self._leaving[resident.content.digest]
                if resident.has_room:
                    shelf.num_leaving -= resident.content.num_bytes
                    shelf.remove(resident)

    def _suspend(self) -> None:
        """Note the loss of the shards. Adapters that nothing refers to will not be loaded again."""
        self._num_losses += 1
        if not self._given_up:
            self._decided.clear()
        for resident in list(self._table.values()):
            if resident.is_idle:
                del self._table[resident.content.digest]
                resident.is_loaded = False
                self._shelves[resident.content.kind].remove(resident)

    async def _restore(self) -> None:
        """Unload leftovers, and load all loaded adapters again. Those that were just being loaded load
        themselves, but their copies must stay too."""
        try:
            await self.shards.unload(list(self._table), others=True)
        except ContentCallError:
            logger.exception("the shards do not unload what is left over")
        slots = asyncio.Semaphore(MAX_RESTORES)
        loaded = [resident for resident in self._table.values() if resident.is_loaded]
        for resident in loaded:  # they may not be evicted while they are loaded
            self.refer(resident)
        try:
            async with asyncio.TaskGroup() as group:
                for resident in loaded:
                    group.create_task(self._load_again(resident, slots))
        except ExceptionGroup as losses:
            raise losses.exceptions[0] from None
        finally:
            for resident in loaded:
                self.release(resident)

    async def _load_again(self, resident: Resident, slots: asyncio.Semaphore) -> None:
        digest, shelf = resident.content.digest, self._shelves[resident.content.kind]
        async with slots:
            try:
                await self.shards.load(digest, shelf.limit_s)
            except ContentCallError as error:
                logger.error("the %s %.16s is lost: %s", resident.content.kind.name.lower(), digest, error)
                self._leave([resident])
