"""Answers the router's calls that find, load, copy and unload adapters, with gRPC statuses for errors."""

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
# Concurrency limits of calls that read files. Further calls wait without a thread, at most until their
# deadlines.
NUM_FINDS, NUM_LOADS, NUM_COPIES = 16, 2, 4
SWEEP_INTERVAL_S = 60.0  # between two searches for copies that were found and never loaded
FULL = (errno.ENOSPC, errno.EDQUOT)
MAX_CAUSE_CHARS = 500  # a status is metadata, whose size is limited

Method = TypeVar("Method", bound=Callable[..., object])


def _beside_others(num_threads: int, name: str) -> Callable[[Method], Method]:
    """Make gRPC run a method on threads of its own, so that a hanging disk does not block gRPC's threads. A
    call that ends while it waits for a thread is never started. This uses an experimental attribute; if gRPC
    removes it, calls wait for each other again, and a test fails."""

    def mark(method: Method) -> Method:
        method.experimental_thread_pool = ThreadPoolExecutor(num_threads, name)  # type: ignore[attr-defined]
        return method

    return mark


class AdapterServicer(ShardServiceServicer):
    """Part of the shard's service that is about adapters. Only rank 0 searches its `store`. All ranks load
    the copies in `artifacts` into `adapters`."""

    def __init__(self, store: AdapterStore, artifacts: ArtifactCache, adapters: LoadedAdapters) -> None:
        self._store, self._artifacts, self._adapters = store, artifacts, adapters
        self._swept_at = time.monotonic()

    @_beside_others(NUM_FINDS, "find")
    def Find(self, request: pb.FindRequest, context: grpc.ServicerContext) -> pb.FindResponse:
        with self._aborting(context):
            failpoints.hit("shard.before_find", lambda: [f"id={request.id}"])
            found, loaded = self._store.find(KINDS[request.kind], request.id), self._adapters.digests
            if found.digest not in loaded and not context.is_active():  # the router will never unload it
                self._artifacts.remove([found.digest])
            if time.monotonic() - self._swept_at > SWEEP_INTERVAL_S:
                self._swept_at = time.monotonic()
                self._artifacts.sweep(loaded)
        return pb.FindResponse(
            kind=NUMBERS[found.kind],
            digest=found.digest,
            num_decoder_tokens=found.num_decoder_tokens,
            num_encoder_tokens=found.num_encoder_tokens,
            num_bytes=found.num_bytes,
        )

    @_beside_others(NUM_LOADS, "load")
    def Load(self, request: pb.LoadRequest, context: grpc.ServicerContext) -> pb.LoadResponse:
        with self._aborting(context):
            try:
                self._adapters.load(request.digest)
            except AdapterError as error:
                if error.__cause__ is None:  # otherwise the cause, such as the disk, may go away
                    self._store.refuse(request.digest, error)
                raise
        return pb.LoadResponse()

    @_beside_others(NUM_COPIES, "copy")
    def Fetch(self, request: pb.FetchRequest, context: grpc.ServicerContext) -> Iterator[pb.FetchResponse]:
        with self._aborting(context):
            pieces = self._artifacts.read_pieces(request.digest)
        for piece in pieces:
            yield pb.FetchResponse(data=piece)

    @_beside_others(NUM_COPIES, "put")
    def Put(self, requests: Iterator[pb.PutRequest], context: grpc.ServicerContext) -> pb.PutResponse:
        """Write a copy from the stream. The digest's check refuses a stream that was cut off."""
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
        """End the call with a status after any error: files may be hostile, and only this call may fail."""
        try:
            yield
        except Exception as error:
            context.abort(*_explain(error, self._artifacts.directory))


def _explain(error: Exception, directory: Path) -> tuple[grpc.StatusCode, str]:
    """Return an error's status and text. Only an AdapterError's text is for clients; others are for logs."""
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
