"""Registry of adapters. It finds the soft prompt and the LoRA adapter that a call's ids name, anew for each
call, loads them on the shards, and keeps them loaded until the call ends. Its refusals have the contract's
words."""

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType

import grpc

from tgis.pb import shard_pb2 as pb
from tgis.router.adapters.residency import Residents
from tgis.router.adapters.shelf import Resident
from tgis.router.errors import (
    Code,
    GenerationError,
    OverloadedError,
    RequestError,
    RouterError,
    StartupError,
    UnavailableError,
    internal_error,
)
from tgis.router.metrics.metrics import Metrics
from tgis.router.metrics.resource_counts import ResourceCount
from tgis.router.sequence import Content, ContentKind, Tuning
from tgis.router.shards.client import ContentCallError

logger = logging.getLogger(__name__)

MAX_ID_BYTES = 256
MAX_FINDS = 16  # look-ups at once, so that a disk that hangs does not take all of the shard's threads
TIMEOUT = "Timeout expired"
NO_COPY = "no room is left for a copy"
REFUSALS = {
    ContentKind.PROMPT: "can't retrieve prompt prefix with id '{}': {}",
    ContentKind.ADAPTER: "can't retrieve adapter with id '{}': {}",
}
UNKNOWN = {ContentKind.PROMPT: 'prefix id "{}" not found', ContentKind.ADAPTER: "directory does not exist"}
TOO_LARGE = {
    ContentKind.PROMPT: "Prefix ID object {} exceeds the allowed cache size",
    ContentKind.ADAPTER: "adapter {} exceeds the allowed cache size",
}


class NoRoomError(RequestError):
    """Refusal of an adapter that can never fit beside the preloaded ones."""


@dataclass(eq=False)
class _Flight:
    """Look-up that several calls may wait for."""

    task: asyncio.Task[Content]
    num_waiting: int = 0


class Contents:
    """Registry that finds adapters and keeps the preloaded ones loaded."""

    def __init__(self, residents: Residents, metrics: Metrics) -> None:
        self.residents = residents
        self.failures = {
            ContentKind.PROMPT: metrics.prompts.load_failure,
            ContentKind.ADAPTER: metrics.adapters.load_failure,
        }
        self.uses = ResourceCount()
        metrics.follow_resource("content", self.uses)
        self._finds: dict[tuple[ContentKind, str], _Flight] = {}
        self._slots = asyncio.Semaphore(MAX_FINDS)
        self._pinned: dict[str, Resident | None] = {}
        """Preloaded adapters by id. None if the id has new content that was never loaded."""

    async def start(self) -> pb.InfoResponse:
        """Connect to the shards, and load the adapters that they want loaded before the first request. Raises
        StartupError."""
        while True:
            info = await self.residents.connect()
            try:
                for adapter_id in info.preloaded_adapter_ids:
                    await self._preload(adapter_id)
            except UnavailableError:
                logger.warning("the shards were lost while adapters were loaded")
                continue
            except (OverloadedError, NoRoomError) as error:
                text = f"the adapters to preload have no room: {adapter_id!r} does not fit beside the others"
                raise StartupError(text) from error
            except RouterError as error:
                raise StartupError(f"the adapter {adapter_id!r} cannot be loaded: {error}") from error
            return info

    def hold(self, prefix_id: str | None, adapter_id: str | None, request_id: str) -> "Hold":
        """Return the lease of one call, which has taken nothing yet. An id of None is an absent field."""
        return Hold(self, prefix_id, adapter_id, request_id)

    async def find(self, kind: ContentKind, content_id: str) -> Content:
        """Find an adapter by its id. Only one look-up per id runs at a time, and calls that come during it
        share its answer. Raises ContentCallError and UnavailableError."""
        key = kind, content_id
        flight = self._finds.get(key)
        if flight is None:
            flight = self._finds[key] = _Flight(
                asyncio.create_task(self._find(kind, content_id), name="find")
            )
        flight.num_waiting += 1
        try:
            return await asyncio.shield(flight.task)
        finally:
            flight.num_waiting -= 1
            if (flight.task.done() or not flight.num_waiting) and self._finds.get(key) is flight:
                flight.task.cancel()
                del self._finds[key]

    async def load(self, content: Content, kind: ContentKind, content_id: str, began: float) -> Resident:
        """Load content that was found under an id of `kind`, unless it is loaded, and take a reference to it.
        Raises RequestError, and everything that `Residents.take` raises."""
        is_pinned = kind is ContentKind.ADAPTER and content_id in self._pinned
        if is_pinned:
            self._unpin(content_id, content.digest)
        if content.num_bytes > self._room(content):
            self.residents.forget(content)
            error = RequestError if content.num_bytes > self.residents.capacity(content.kind) else NoRoomError
            raise error(_text(kind, content_id, TOO_LARGE[content.kind].format(content_id)))

        async def copy_again() -> bool:
            # Do not share a look-up with others, because it may have begun before the copy was removed.
            try:
                return (await self._find(kind, content_id)).digest == content.digest
            except ContentCallError:
                return False

        resident = await self.residents.take(content, copy_again, began)
        if is_pinned:
            self._pin(content_id, resident)
        return resident

    def _room(self, content: Content) -> int:
        """Return the bytes that are available for it beside the other preloaded adapters."""
        kept = {one for one in self._pinned.values() if one and one.content.kind is content.kind}
        others = sum(one.content.num_bytes for one in kept if one.content.digest != content.digest)
        return self.residents.capacity(content.kind) - others

    async def _find(self, kind: ContentKind, content_id: str) -> Content:
        limit_s = self.residents.limit_s(kind)

        async def find() -> Content:
            async with asyncio.timeout(limit_s), self._slots:
                return await self.residents.shards.find(kind, content_id, limit_s)

        try:
            return await self.residents.ask(find)
        except TimeoutError:
            logger.warning("looking for %s %r took more than %s s", kind.name.lower(), content_id, limit_s)
            raise ContentCallError(grpc.StatusCode.DEADLINE_EXCEEDED, TIMEOUT) from None
        except ContentCallError as error:
            # There is no room for a copy. Copies of idle adapters only save a load, so they can go.
            if error.code is not grpc.StatusCode.RESOURCE_EXHAUSTED or not await self.residents.drop_idle():
                raise
            return await self.residents.ask(find)

    async def _preload(self, adapter_id: str) -> None:
        if adapter_id not in self._pinned:
            with self.hold(None, adapter_id, "preload") as hold:
                await hold.take()
                self._pin(adapter_id, hold.residents[0])

    def _pin(self, adapter_id: str, resident: Resident) -> None:
        """Keep an adapter loaded until its id has another one."""
        if self._pinned.get(adapter_id) is not resident:
            self._unpin(adapter_id, resident.content.digest)
            self.residents.refer(resident)
            self._pinned[adapter_id] = resident

    def _unpin(self, adapter_id: str, digest: str) -> None:
        """Stop keeping the adapter of this id, unless it has this digest. The new one may need its room."""
        before = self._pinned.get(adapter_id)
        if before is not None and before.content.digest != digest:
            self._pinned[adapter_id] = None
            self.residents.release(before)


class Hold:
    """Lease of the adapters of one call. It is a context manager, which gives them up at its end."""

    def __init__(
        self, contents: Contents, prefix_id: str | None, adapter_id: str | None, request_id: str
    ) -> None:
        self._contents, self._request_id = contents, request_id
        self._prefix_id, self._adapter_id = prefix_id, adapter_id or None
        self.residents: list[Resident] = []

    def __enter__(self) -> "Hold":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        while self.residents:
            self._contents.uses.released += 1
            self._contents.residents.release(self.residents.pop())

    async def take(self) -> Tuning:
        """Find and load the adapters that the ids name. Raises RouterError."""
        adapter = prompt = None
        if self._adapter_id is not None:
            adapter = await self._take(ContentKind.ADAPTER, self._adapter_id)
        if self._prefix_id is not None:
            prompt = await self._take(ContentKind.PROMPT, self._prefix_id)
            if prompt.kind is ContentKind.ADAPTER:
                adapter, prompt = prompt, None
        return Tuning(prompt, adapter)

    async def _take(self, kind: ContentKind, content_id: str) -> Content:
        try:
            return await self._find_and_load(kind, content_id)
        except RouterError:
            self._contents.failures[kind].add()
            raise

    async def _find_and_load(self, kind: ContentKind, content_id: str) -> Content:
        if len(content_id.encode()) > MAX_ID_BYTES:  # such an id would not fit into a status
            shown = content_id.encode()[:MAX_ID_BYTES].decode(errors="ignore")
            raise RequestError(_text(kind, shown, UNKNOWN[kind].format(shown)))
        for is_second in (False, True):
            began = time.monotonic()
            with self._refusing(kind, content_id, is_complete=True):
                found = await self._contents.find(kind, content_id)
            if found.kind is not kind and self._adapter_id is not None:
                self._contents.residents.forget(found)
                raise RequestError(_text(kind, content_id, "it is an adapter, but adapter_id names one too"))
            with self._refusing(kind, content_id):
                try:
                    self.residents.append(await self._contents.load(found, kind, content_id, began))
                    self._contents.uses.created += 1
                    break
                except ContentCallError as error:
                    # The adapter was replaced or removed between look-up and load, so a second look-up
                    # decides.
                    if is_second or error.code is not grpc.StatusCode.NOT_FOUND:
                        raise
        return self.residents[-1].content

    @contextmanager
    def _refusing(self, kind: ContentKind, content_id: str, is_complete: bool = False) -> Iterator[None]:
        """Turn errors of the shards into errors for the client. `is_complete` means that the shards' text is
        the client's whole text."""
        try:
            yield
        except ContentCallError as error:
            raise self._refusal(kind, content_id, error, is_complete) from error

    def _refusal(
        self, kind: ContentKind, content_id: str, error: ContentCallError, is_complete: bool
    ) -> RouterError:
        match error.code:
            case grpc.StatusCode.INVALID_ARGUMENT:
                return RequestError(error.details if is_complete else _text(kind, content_id, error.details))
            case grpc.StatusCode.DEADLINE_EXCEEDED:
                return RequestError(_text(kind, content_id, TIMEOUT))
            case grpc.StatusCode.RESOURCE_EXHAUSTED:
                is_told = error.details == NO_COPY  # else the library may have said anything
                text = _text(kind, content_id, NO_COPY if is_told else "out of memory")
                return GenerationError(text, Code.RESOURCE_EXHAUSTED)
        logger.error("request %s failed: the shards answer %s", self._request_id, error)
        return GenerationError(internal_error(self._request_id))


def _text(kind: ContentKind, content_id: str, cause: str) -> str:
    return REFUSALS[kind].format(content_id, cause)
