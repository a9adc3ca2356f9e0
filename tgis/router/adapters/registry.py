"""Registry of adapters: finds the soft prompt and LoRA adapter that a call's ids name, and keeps them loaded
until the call ends. Every call looks its ids up again. Error texts are the contract's."""

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import grpc

from tgis.pb import shard_pb2 as pb
from tgis.router.adapters.residency import AdapterEntry, AdapterResidency
from tgis.router.errors import (
    Code,
    GenerationError,
    NotFoundError,
    OverloadedError,
    RequestError,
    RouterError,
    StartupError,
    UnavailableError,
    internal_error,
)
from tgis.router.metrics.metrics import Metrics
from tgis.router.metrics.resource_counts import ResourceCount
from tgis.router.sequence import AdapterInfo, AdapterKind, CallAdapters
from tgis.router.shards.client import AdapterCallError

logger = logging.getLogger(__name__)

MAX_ID_BYTES = 256
MAX_FINDS = (
    16  # concurrency limit of look-ups, so that a hanging disk does not block all of the shard's threads
)
TIMEOUT = "Timeout expired"
NO_COPY = "no room is left for a copy"
REFUSALS = {
    AdapterKind.SOFT_PROMPT: "can't retrieve prompt prefix with id '{}': {}",
    AdapterKind.LORA: "can't retrieve adapter with id '{}': {}",
}
UNKNOWN = {AdapterKind.SOFT_PROMPT: 'prefix id "{}" not found', AdapterKind.LORA: "directory does not exist"}
FIELDS = {AdapterKind.SOFT_PROMPT: "prefix_id", AdapterKind.LORA: "adapter_id"}
TOO_LARGE = {
    AdapterKind.SOFT_PROMPT: "Prefix ID object {} exceeds the allowed cache size",
    AdapterKind.LORA: "adapter {} exceeds the allowed cache size",
}


class NoRoomError(RequestError):
    """Error when an adapter can never fit into memory together with the preloaded ones."""


@dataclass(eq=False)
class _Lookup:
    """Look-up that several calls can wait for."""

    task: asyncio.Task[AdapterInfo]
    num_waiting: int = 0


class AdapterRegistry:
    def __init__(self, residency: AdapterResidency, metrics: Metrics) -> None:
        self.residency = residency
        self.uses = ResourceCount()
        metrics.follow_resource("content", self.uses)
        self._lookups: dict[tuple[AdapterKind, str], _Lookup] = {}
        self._slots = asyncio.Semaphore(MAX_FINDS)
        self._pinned: dict[str, AdapterEntry | None] = {}
        """Preloaded adapters by id; None if the id now names a different adapter, which has not been
        loaded."""

    async def start(self) -> pb.InfoResponse:
        """Connect to the shards and load the preloaded adapters. Raises StartupError."""
        while True:
            info = await self.residency.connect()
            try:
                for adapter_id in info.preloaded_adapter_ids:
                    await self._preload(adapter_id)
            except UnavailableError:
                logger.warning("the shards were lost while loading adapters; retrying")
                continue
            except (OverloadedError, NoRoomError) as error:
                raise StartupError(
                    f"the adapter {adapter_id!r} cannot be preloaded: it does not fit into memory with the "
                    "others; increase --adapter-cache-size-mb or preload fewer"
                ) from error
            except RouterError as error:
                raise StartupError(f"the adapter {adapter_id!r} cannot be preloaded: {error}") from error
            return info

    @contextmanager
    def lease(
        self, prefix_id: str | None, adapter_id: str | None, request_id: str
    ) -> Iterator["AdapterLease"]:
        """Open an empty lease for one call. An id of None is an absent field."""
        lease = AdapterLease(self, prefix_id, adapter_id or None, request_id)
        try:
            yield lease
        finally:
            lease.release()

    async def find(self, kind: AdapterKind, adapter_id: str) -> AdapterInfo:
        """Find an adapter. Concurrent calls share a look-up. Raises AdapterCallError and UnavailableError."""
        key = kind, adapter_id
        lookup = self._lookups.get(key)
        if lookup is None:
            task = asyncio.create_task(self._find(kind, adapter_id), name="find")
            lookup = self._lookups[key] = _Lookup(task)
        lookup.num_waiting += 1
        try:
            return await asyncio.shield(lookup.task)
        finally:
            lookup.num_waiting -= 1
            if (lookup.task.done() or not lookup.num_waiting) and self._lookups.get(key) is lookup:
                lookup.task.cancel()
                del self._lookups[key]

    async def load(self, info: AdapterInfo, kind: AdapterKind, adapter_id: str, began: float) -> AdapterEntry:
        """Load an adapter and add a reference to it. Raises RequestError and the errors of
        `residency.take`."""
        is_pinned = kind is AdapterKind.LORA and adapter_id in self._pinned
        if is_pinned:
            self._unpin(adapter_id, info.digest)
        self._check_size(info, kind, adapter_id)
        entry = await self.load_again(info, kind, adapter_id, began)
        if is_pinned:
            self._pin(adapter_id, entry)
        return entry

    async def load_again(
        self, info: AdapterInfo, kind: AdapterKind, adapter_id: str, began: float
    ) -> AdapterEntry:
        """Load the adapter that the id named before, even if it names another one now, and add a reference to
        it. Raises the errors of `residency.take`."""

        async def copy_again() -> bool:
            # A shared look-up may have begun before the copy was removed, so start a new one.
            try:
                return (await self._find(kind, adapter_id)).digest == info.digest
            except AdapterCallError:
                return False

        return await self.residency.take(info, copy_again, began)

    def _check_size(self, info: AdapterInfo, kind: AdapterKind, adapter_id: str) -> None:
        """Raise RequestError if an adapter can never fit together with the other preloaded ones."""
        capacity = self.residency.caches[info.kind].capacity
        pinned = {entry.info for entry in self._pinned.values() if entry is not None}
        others = [each for each in pinned if each.kind is info.kind and each.digest != info.digest]
        if info.num_bytes > capacity - sum(each.num_bytes for each in others):
            self.residency.forget(info)
            error = RequestError if info.num_bytes > capacity else NoRoomError
            raise error(_text(kind, adapter_id, TOO_LARGE[info.kind].format(adapter_id)), FIELDS[kind])

    async def _find(self, kind: AdapterKind, adapter_id: str) -> AdapterInfo:
        limit_s = self.residency.caches[kind].limit_s
        find = partial(self._find_in_time, kind, adapter_id, limit_s)
        try:
            return await self.residency.ask(find)
        except AdapterCallError as error:
            if error.code is grpc.StatusCode.DEADLINE_EXCEEDED:
                logger.warning(
                    "the look-up of the %s %r took more than %s s", kind.label, adapter_id, limit_s
                )
            # The disk is full. Copies of idle adapters only speed up loads, so they can be removed.
            if error.code is not grpc.StatusCode.RESOURCE_EXHAUSTED or not await self.residency.drop_idle():
                raise
            return await self.residency.ask(find)

    async def _find_in_time(self, kind: AdapterKind, adapter_id: str, limit_s: float) -> AdapterInfo:
        """Find an adapter. The time limit includes the wait for earlier look-ups. Raises ShardsLostError if
        the time runs out because a shard does not answer."""
        shards = self.residency.shards
        deadline = time.monotonic() + limit_s
        try:
            async with asyncio.timeout(limit_s):
                await self._slots.acquire()
        except TimeoutError:
            await shards.check_alive([0])
            raise AdapterCallError(grpc.StatusCode.DEADLINE_EXCEEDED, TIMEOUT) from None
        try:
            return await shards.find(kind, adapter_id, deadline - time.monotonic())
        finally:
            self._slots.release()

    async def _preload(self, adapter_id: str) -> None:
        if adapter_id not in self._pinned:
            with self.lease(None, adapter_id, "preload") as lease:
                await lease.take()
                self._pin(adapter_id, lease.entries[0])

    def _pin(self, adapter_id: str, entry: AdapterEntry) -> None:
        """Keep an adapter loaded until its id names a different one."""
        if self._pinned.get(adapter_id) is not entry:
            self._unpin(adapter_id, entry.info.digest)
            entry.num_references += 1
            self._pinned[adapter_id] = entry

    def _unpin(self, adapter_id: str, digest: str) -> None:
        """Unpin the adapter of this id unless it has this digest. A new adapter may need its memory."""
        before = self._pinned.get(adapter_id)
        if before is not None and before.info.digest != digest:
            self._pinned[adapter_id] = None
            self.residency.release(before)


@dataclass(eq=False)
class AdapterLease:
    registry: AdapterRegistry
    prefix_id: str | None
    adapter_id: str | None
    request_id: str
    entries: list[AdapterEntry] = field(default_factory=list)

    def release(self) -> None:
        while self.entries:
            self.registry.uses.released += 1
            self.registry.residency.release(self.entries.pop())

    async def take(self) -> CallAdapters:
        """Find and load the adapters that the ids name. Raises RouterError."""
        lora = prompt = None
        lora_id = self.adapter_id or ""
        if self.adapter_id is not None:
            lora = await self._take(AdapterKind.LORA, self.adapter_id)
        if self.prefix_id is not None:
            prompt = await self._take(AdapterKind.SOFT_PROMPT, self.prefix_id)
            if prompt.kind is AdapterKind.LORA:
                lora = prompt
                lora_id = self.prefix_id
                prompt = None
        return CallAdapters(prompt, lora, lora_id)

    async def take_again(self, adapters: CallAdapters) -> CallAdapters:
        """Load adapters that were found before, even if the ids name others now. Callers must start this
        before the engine connects to the shards, so that the shards keep the copies. Raises RouterError and
        AdapterCallError."""
        lora_kind = AdapterKind.SOFT_PROMPT if self.adapter_id is None else AdapterKind.LORA
        try:
            async with asyncio.TaskGroup() as group:
                lora = group.create_task(self._load_again(adapters.lora, lora_kind, adapters.lora_id))
                prompt = group.create_task(
                    self._load_again(adapters.soft_prompt, AdapterKind.SOFT_PROMPT, self.prefix_id or "")
                )
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return CallAdapters(prompt.result(), lora.result(), adapters.lora_id)

    async def _load_again(
        self, info: AdapterInfo | None, kind: AdapterKind, adapter_id: str
    ) -> AdapterInfo | None:
        if info is None:
            return None
        entry = await self.registry.load_again(info, kind, adapter_id, time.monotonic())
        self._add(entry)
        return entry.info

    def _add(self, entry: AdapterEntry) -> None:
        self.registry.uses.created += 1
        self.entries.append(entry)

    async def _take(self, kind: AdapterKind, adapter_id: str) -> AdapterInfo:
        try:
            if len(adapter_id.encode()) > MAX_ID_BYTES:  # a longer id does not fit into a gRPC status
                shown = adapter_id.encode()[:MAX_ID_BYTES].decode(errors="ignore")
                raise NotFoundError(_text(kind, shown, UNKNOWN[kind].format(shown)))
            entry = await self._find_and_load(kind, adapter_id)
        except RouterError:
            self.registry.residency.caches[kind].metrics.load_failure.add()
            raise
        self._add(entry)
        return entry.info

    async def _find_and_load(
        self, kind: AdapterKind, adapter_id: str, is_second_try: bool = False
    ) -> AdapterEntry:
        began = time.monotonic()
        try:
            adapter = await self.registry.find(kind, adapter_id)
        except AdapterCallError as error:
            if error.code is grpc.StatusCode.NOT_FOUND:
                raise NotFoundError(error.details) from error
            raise self._refusal(kind, adapter_id, error, error.details) from error
        if adapter.kind is not kind and self.adapter_id is not None:
            self.registry.residency.forget(adapter)
            cause = "it is an adapter, but adapter_id names one too"
            raise RequestError(_text(kind, adapter_id, cause), FIELDS[kind])
        try:
            return await self.registry.load(adapter, kind, adapter_id, began)
        except AdapterCallError as error:
            if error.code is not grpc.StatusCode.NOT_FOUND or is_second_try:
                raise self._refusal(
                    kind, adapter_id, error, _text(kind, adapter_id, error.details)
                ) from error
        # The adapter was replaced or removed between look-up and load, so look it up once more.
        return await self._find_and_load(kind, adapter_id, is_second_try=True)

    def _refusal(
        self, kind: AdapterKind, adapter_id: str, error: AdapterCallError, client_text: str
    ) -> RouterError:
        """Return the error for the client. `client_text` is its text if the shard's text is meant for
        clients."""
        match error.code:
            case grpc.StatusCode.INVALID_ARGUMENT:
                return RequestError(client_text, FIELDS[kind])
            case grpc.StatusCode.DEADLINE_EXCEEDED:
                return RequestError(_text(kind, adapter_id, TIMEOUT), FIELDS[kind])
            case grpc.StatusCode.RESOURCE_EXHAUSTED:
                is_disk_full = error.details == NO_COPY  # any other text is internal
                text = _text(kind, adapter_id, NO_COPY if is_disk_full else "out of memory")
                return GenerationError(text, Code.RESOURCE_EXHAUSTED)
        logger.error("request %s failed: a shard answered %s", self.request_id, error)
        return GenerationError(internal_error(self.request_id))


def _text(kind: AdapterKind, adapter_id: str, cause: str) -> str:
    return REFUSALS[kind].format(adapter_id, cause)
