"""Answers the router's calls that find, load, copy and unload soft prompts and adapters.

It also turns errors into gRPC statuses."""

import errno
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import TypeVar

import grpc
import torch

from tgis.pb import shard_pb2 as pb
from tgis.prompts.artifact_cache import ArtifactCache, Kind
from tgis.prompts.errors import AdapterError, MissingArtifactError
from tgis.prompts.store import AdapterStore, ArtifactInfo
from tgis.shard.adapters.registry import Contents

logger = logging.getLogger(__name__)

KINDS: dict[pb.ContentKind, Kind] = {
    pb.CONTENT_KIND_PROMPT: "prompt",
    pb.CONTENT_KIND_ADAPTER: "adapter",
}
NUMBERS = {kind: number for number, kind in KINDS.items()}
SWEEP_INTERVAL_S = 60.0  # between two searches for copies that were found and never loaded
FULL = (errno.ENOSPC, errno.EDQUOT)
MAX_CAUSE_CHARS = 500  # a status is metadata, whose size is limited

Response = TypeVar("Response")


class ContentCalls:
    """Handlers of the calls.

    Only rank 0 searches its `store`. All ranks load the copies in `artifacts` into their `contents`."""

    def __init__(self, store: AdapterStore, artifacts: ArtifactCache, contents: Contents) -> None:
        self._store, self._artifacts, self._contents = store, artifacts, contents
        self._swept_at = time.monotonic()

    def find(self, request: pb.FindRequest, context: grpc.ServicerContext) -> pb.FindResponse:
        found = self._answer(context, lambda: self._find(request, context))
        return pb.FindResponse(
            kind=NUMBERS[found.kind],
            digest=found.digest,
            num_decoder_tokens=found.num_decoder_tokens,
            num_encoder_tokens=found.num_encoder_tokens,
            num_bytes=found.num_bytes,
        )

    def _find(self, request: pb.FindRequest, context: grpc.ServicerContext) -> ArtifactInfo:
        found, loaded = self._store.find(KINDS[request.kind], request.id), self._contents.digests
        if found.digest not in loaded and not context.is_active():  # the router will never unload it
            self._artifacts.remove([found.digest])
        if time.monotonic() - self._swept_at > SWEEP_INTERVAL_S:
            self._swept_at = time.monotonic()
            self._artifacts.sweep(loaded)
        return found

    def load(self, request: pb.LoadRequest, context: grpc.ServicerContext) -> pb.LoadResponse:
        self._answer(context, lambda: self._load(request.digest))
        return pb.LoadResponse()

    def _load(self, digest: str) -> None:
        try:
            self._contents.load(digest)
        except AdapterError as error:
            if error.__cause__ is None:  # otherwise the cause, such as the disk, may go away
                self._store.refuse(digest, error)
            raise

    def fetch(self, request: pb.FetchRequest, context: grpc.ServicerContext) -> Iterator[pb.FetchResponse]:
        for piece in self._answer(context, lambda: self._artifacts.read_pieces(request.digest)):
            yield pb.FetchResponse(data=piece)

    def put(self, requests: Iterator[pb.PutRequest], context: grpc.ServicerContext) -> pb.PutResponse:
        self._answer(context, lambda: self._put(requests))
        return pb.PutResponse()

    def _put(self, requests: Iterator[pb.PutRequest]) -> None:
        """Write a copy from the stream. The digest's check refuses a stream that was cut off."""
        try:
            first = next(requests, pb.PutRequest())
            self._artifacts.write_pieces(first.digest, (one.data for one in chain([first], requests)))
        except grpc.RpcError as error:
            raise MissingArtifactError("the call is over") from error
        finally:
            with suppress(grpc.RpcError):
                deque(requests, maxlen=0)

    def unload(self, request: pb.UnloadRequest, context: grpc.ServicerContext) -> pb.UnloadResponse:
        self._answer(context, lambda: self._unload(request))
        return pb.UnloadResponse()

    def _unload(self, request: pb.UnloadRequest) -> None:
        if request.others:
            self._contents.unload_others(request.digests)
            self._artifacts.remove_others(request.digests)
        else:
            self._contents.unload(request.digests)
            self._artifacts.remove(request.digests)

    def _answer(self, context: grpc.ServicerContext, compute: Callable[[], Response]) -> Response:
        try:
            answer = compute()
        except Exception as error:  # files may be hostile, and any error must fail only this call
            context.abort(*_explain(error, self._artifacts.directory))
        return answer


def _explain(error: Exception, directory: Path) -> tuple[grpc.StatusCode, str]:
    """Return the status and text of an error.

    Only an AdapterError's text is for clients. The texts of other errors are for logs, the router's included.
    """
    if isinstance(error, AdapterError):
        return grpc.StatusCode.INVALID_ARGUMENT, str(error)
    if isinstance(error, MissingArtifactError):
        return grpc.StatusCode.NOT_FOUND, "no copy is kept"
    if isinstance(error, OSError) and error.errno in FULL:
        logger.error("%s: no room is left for copies of soft prompts and adapters", directory)
        return grpc.StatusCode.RESOURCE_EXHAUSTED, "no room is left for a copy"
    logger.error("a call about a soft prompt or an adapter failed", exc_info=error)
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return grpc.StatusCode.RESOURCE_EXHAUSTED, "out of memory"
    return grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {error}"[:MAX_CAUSE_CHARS]
