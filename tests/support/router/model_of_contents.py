"""Rules of shard.proto for soft prompts and adapters in plain Python: the store, the copies, and what each
rank has loaded. Violations are recorded for tests."""

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NoReturn

import grpc

from tests.support.router.model_of_shard import integers
from tgis.pb import shard_pb2 as pb

PROMPT, ADAPTER = pb.CONTENT_KIND_PROMPT, pb.CONTENT_KIND_ADAPTER
TEXTS = {
    PROMPT: "can't retrieve prompt prefix with id '{0}': prefix id \"{0}\" not found",
    ADAPTER: "can't retrieve adapter with id '{0}': directory does not exist",
}


@dataclass(frozen=True)
class Item:
    """Directory in the store."""

    digest: str
    num_decoder_tokens: int = 0
    num_encoder_tokens: int = 0
    num_bytes: int = 1024
    kind: pb.ContentKind = PROMPT


def adapter(digest: str, num_bytes: int = 1024) -> Item:
    return Item(digest, num_bytes=num_bytes, kind=ADAPTER)


@dataclass
class Library:
    """Store and copies. All ranks share them, and they survive a restart."""

    store: dict[tuple[pb.ContentKind, str], Item] = field(default_factory=dict)
    copies: dict[str, Item] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    finds: Counter[str] = field(default_factory=Counter)
    loads: Counter[str] = field(default_factory=Counter)
    """Numbers of loads on the first rank, by digest."""
    find_s: float = 0.0
    load_s: float = 0.0
    unload_s: float = 0.0
    max_copies: int = 10**9
    stuck: threading.Event | None = None
    """Gate that find calls wait for."""
    num_finding: int = 0
    max_finding: int = 0
    errors: dict[tuple[int, str], tuple[grpc.StatusCode, str]] = field(default_factory=dict)
    """Errors of loads by rank and digest, and of finds by rank -1 and id."""
    elsewhere: defaultdict[int, set[str]] = field(default_factory=lambda: defaultdict(set))
    """Digests of the copies missing on a rank's machine."""
    put_error: tuple[grpc.StatusCode, str] | None = None
    relayed: Counter[int] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def put(self, item: Item, content_id: str) -> None:
        self.store[item.kind, content_id] = item

    def rule(self, holds: bool, text: str) -> None:
        if not holds:
            self.faults.append(text)


class ShelfOfShard:
    """Loaded items of one rank."""

    def __init__(self, library: Library, info: pb.InfoResponse, rank: int) -> None:
        self.library, self.rank = library, rank
        self.capacities = {PROMPT: info.prompt_cache_bytes, ADAPTER: info.adapter_cache_bytes}
        self.loaded: dict[str, Item] = {}

    def find(self, request: pb.FindRequest, context: grpc.ServicerContext) -> pb.FindResponse:
        library = self.library
        with library.lock:
            library.finds[request.id] += 1
            library.num_finding += 1
            library.max_finding = max(library.max_finding, library.num_finding)
        time.sleep(library.find_s)
        if library.stuck is not None:
            library.stuck.wait(20)
        with library.lock:
            library.num_finding -= 1
        if (-1, request.id) in library.errors:
            fail(context, library.errors[-1, request.id])
        item = library.store.get((request.kind, request.id))
        if item is None:
            fail(context, (grpc.StatusCode.NOT_FOUND, TEXTS[request.kind].format(request.id)))
        with library.lock:
            is_full = item.digest not in library.copies and len(library.copies) >= library.max_copies
            if not is_full:
                library.copies[item.digest] = item
        if is_full:
            fail(context, (grpc.StatusCode.RESOURCE_EXHAUSTED, "no room is left for a copy"))
        return pb.FindResponse(
            kind=item.kind,
            digest=item.digest,
            num_decoder_tokens=item.num_decoder_tokens,
            num_encoder_tokens=item.num_encoder_tokens,
            num_bytes=item.num_bytes,
        )

    def load(self, request: pb.LoadRequest, context: grpc.ServicerContext) -> pb.LoadResponse:
        library, digest = self.library, request.digest
        time.sleep(library.load_s)
        if (self.rank, digest) in library.errors:
            fail(context, library.errors[self.rank, digest])
        with library.lock:
            if (
                not context.is_active()
            ):  # the call may run late, after another connection has unloaded everything
                fail(context, (grpc.StatusCode.CANCELLED, ""))
            item = None if digest in library.elsewhere[self.rank] else library.copies.get(digest)
            if item is not None:
                library.loads[digest] += self.rank == 0
                self.loaded[digest] = item
                of_kind = sum(one.num_bytes for one in self.loaded.values() if one.kind == item.kind)
                library.rule(of_kind <= self.capacities[item.kind], f"{of_kind} bytes are loaded")
        if item is None:
            fail(context, (grpc.StatusCode.NOT_FOUND, "no copy is kept"))
        return pb.LoadResponse()

    def fetch(self, request: pb.FetchRequest, context: grpc.ServicerContext) -> Iterator[pb.FetchResponse]:
        library = self.library
        with library.lock:
            is_there = request.digest in library.copies
        if not is_there:
            fail(context, (grpc.StatusCode.NOT_FOUND, "no copy is kept"))
        for letter in request.digest:
            yield pb.FetchResponse(data=letter.encode())

    def put(self, requests: Iterator[pb.PutRequest], context: grpc.ServicerContext) -> pb.PutResponse:
        """Write a copy. Each item's content is its own digest."""
        library, parts = self.library, list(requests)
        if library.put_error is not None:
            fail(context, library.put_error)
        content, digests = b"".join(part.data for part in parts), {part.digest for part in parts}
        # The parts also end when their sender disconnects, which gRPC may report later.
        if digests != {content.decode()} and _ends(context):
            fail(context, (grpc.StatusCode.CANCELLED, ""))
        with library.lock:
            library.rule(digests == {content.decode()}, "a copy is not what it was")
            library.elsewhere[self.rank].discard(content.decode())
            library.relayed[self.rank] += 1
        return pb.PutResponse()

    def unload(self, request: pb.UnloadRequest) -> pb.UnloadResponse:
        time.sleep(self.library.unload_s)
        with self.library.lock:
            for held in (self.loaded, self.library.copies):
                for digest in [one for one in held if (one in request.digests) != request.others]:
                    del held[digest]
        return pb.UnloadResponse()

    def check_row(self, row: pb.OpenRow) -> None:
        library, tokens, inputs = self.library, integers(row.token_ids), integers(row.encoder_token_ids)
        with library.lock:
            for digest, kind in ((row.prompt_digest, PROMPT), (row.adapter_digest, ADAPTER)):
                item = self.loaded.get(digest)
                library.rule(not digest or item is not None, f"rank {self.rank} has not loaded {digest}")
                library.rule(item is None or item.kind == kind, f"{digest} is of another kind")
            prompt = self.loaded.get(row.prompt_digest, Item(""))
        num_decoder, num_encoder = prompt.num_decoder_tokens, prompt.num_encoder_tokens
        num_first = (
            num_decoder + 1 if inputs else max(num_decoder, 1)
        )  # the decoder's start token, or any token
        library.rule(row.prompt_len >= num_first, "no token comes after the prompt")
        library.rule(set(tokens[:num_decoder]) <= {2}, "the decoder's virtual tokens are not padding")
        library.rule(set(inputs[:num_encoder]) <= {2}, "the encoder's virtual tokens are not padding")
        library.rule(len(inputs) >= num_encoder, "the encoder's virtual tokens are missing")


def _ends(context: grpc.ServicerContext) -> bool:
    """Wait for the end of a call. Return True if it ends soon."""
    ended = threading.Event()
    return not context.add_callback(ended.set) or ended.wait(5)


def fail(context: grpc.ServicerContext, error: tuple[grpc.StatusCode, str]) -> NoReturn:
    context.abort(*error)
    raise AssertionError("abort raises")
