"""Answers the router's calls that find, load, copy and unload adapters, and maps errors to gRPC statuses."""

import errno
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import TypeVar

import grpc
import torch

from tgis import failpoints
from tgis.pb import shard_pb2 as pb
from tgis.pb.shard_pb2_grpc import ShardServiceServicer
from tgis.prompts.artifact_cache import ArtifactCache, Kind
from tgis.prompts.errors import AdapterError, AdapterNotFoundError, MissingArtifactError
from tgis.prompts.store import AdapterStore
from tgis.shard.adapters.registry import LoadedAdapters

logger = logging.getLogger(__name__)

KINDS: dict[pb.ContentKind, Kind] = {
    pb.CONTENT_KIND_PROMPT: "prompt",
    pb.CONTENT_KIND_ADAPTER: "adapter",
}
NUMBERS = {kind: number for number, kind in KINDS.items()}
# Concurrency limits of calls that read files. Further calls wait, without a thread, until their deadlines.
MAX_FINDS = 16
MAX_LOADS = 2
MAX_COPIES = 4
SWEEP_INTERVAL_S = 60.0  # between two searches for copies that were made but never loaded
FULL = (errno.ENOSPC, errno.EDQUOT)
MAX_CAUSE_CHARS = 500  # a status is metadata, whose size is limited

Method = TypeVar("Method", bound=Callable[..., object])


def _on_own_threads(num_threads: int, name: str) -> Callable[[Method], Method]:
    """Make gRPC run a method on its own threads, so that a hanging disk does not block gRPC's other threads.
    A call that ends while it waits for a thread never starts. This uses an experimental attribute of gRPC; a
    test fails if gRPC removes it."""

    def mark(method: Method) -> Method:
        method.experimental_thread_pool = ThreadPoolExecutor(num_threads, name)  # type: ignore[attr-defined]
        return method

    return mark


class AdapterServicer(ShardServiceServicer):
    """Adapter methods of the shard's service. Only rank 0 searches the `store`. All ranks load the copies in
    `artifacts` into `adapters`."""

    def __init__(self, store: AdapterStore, artifacts: ArtifactCache, adapters: LoadedAdapters) -> None:
        self._store = store
        self._artifacts = artifacts
        self._adapters = adapters
        self._swept_at = time.monotonic()

    @_on_own_threads(MAX_FINDS, "find")
    def Find(self, request: pb.FindRequest, context: grpc.ServicerContext) -> pb.FindResponse:
        with self._aborting(context):
            failpoints.hit("shard.before_find", lambda: [f"id={request.id}"])
            adapter = self._store.find(KINDS[request.kind], request.id)
            loaded = self._adapters.digests
            if adapter.digest not in loaded and not context.is_active():  # the router will never unload it
                self._artifacts.remove([adapter.digest])
            if time.monotonic() - self._swept_at > SWEEP_INTERVAL_S:
                self._swept_at = time.monotonic()
                self._artifacts.sweep(loaded)
        return pb.FindResponse(
            kind=NUMBERS[adapter.kind],
            digest=adapter.digest,
            num_decoder_tokens=adapter.num_decoder_tokens,
            num_encoder_tokens=adapter.num_encoder_tokens,
            num_bytes=adapter.num_bytes,
        )

    @_on_own_threads(MAX_LOADS, "load")
    def Load(self, request: pb.LoadRequest, context: grpc.ServicerContext) -> pb.LoadResponse:
        with self._aborting(context):
            try:
                self._adapters.load(request.digest)
            except AdapterError as error:
                if error.__cause__ is None:  # a cause, such as a disk error, may be temporary
                    self._store.refuse(request.digest, error)
                raise
        return pb.LoadResponse()

    @_on_own_threads(MAX_COPIES, "copy")
    def Fetch(self, request: pb.FetchRequest, context: grpc.ServicerContext) -> Iterator[pb.FetchResponse]:
        with self._aborting(context):
            pieces = self._artifacts.read_pieces(request.digest)
        for piece in pieces:
            yield pb.FetchResponse(data=piece)

    @_on_own_threads(MAX_COPIES, "put")
    def Put(self, requests: Iterator[pb.PutRequest], context: grpc.ServicerContext) -> pb.PutResponse:
        """Write a copy from the stream. An incomplete stream fails the digest check."""
        with self._aborting(context):
            try:
                first = next(requests, pb.PutRequest())
                self._artifacts.write_pieces(first.digest, (part.data for part in chain([first], requests)))
            except grpc.RpcError as error:
                raise MissingArtifactError("the router ended the call") from error
            finally:
                with suppress(grpc.RpcError):
                    deque(requests, maxlen=0)
        return pb.PutResponse()

    def Unload(self, request: pb.UnloadRequest, context: grpc.ServicerContext) -> pb.UnloadResponse:
        with self._aborting(context):
            if request.others:
                self._adapters.unload_others(request.digests)
                self._artifacts.remove_others(request.digests)
            else:
                self._adapters.unload(request.digests)
                self._artifacts.remove(request.digests)
        return pb.UnloadResponse()

    @contextmanager
    def _aborting(self, context: grpc.ServicerContext) -> Iterator[None]:
        """Convert any error to the call's status: files may be hostile, and only this call may fail."""
        try:
            yield
        except Exception as error:
            context.abort(*_explain(error, self._artifacts.directory))


def _explain(error: Exception, directory: Path) -> tuple[grpc.StatusCode, str]:
    """Return an error's status and text. Only the text of an AdapterError reaches clients; others are
    logged."""
    if isinstance(error, AdapterNotFoundError):
        return grpc.StatusCode.NOT_FOUND, str(error)
    if isinstance(error, AdapterError):
        return grpc.StatusCode.INVALID_ARGUMENT, str(error)
    if isinstance(error, MissingArtifactError):
        return grpc.StatusCode.NOT_FOUND, "no copy is kept"
    if isinstance(error, OSError) and error.errno in FULL:
        logger.error("%s: no space is left for copies of soft prompts and adapters", directory)
        return grpc.StatusCode.RESOURCE_EXHAUSTED, "no room is left for a copy"
    logger.error("finding, loading or copying an adapter failed", exc_info=error)
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return grpc.StatusCode.RESOURCE_EXHAUSTED, "out of memory"
    return grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {error}"[:MAX_CAUSE_CHARS]
