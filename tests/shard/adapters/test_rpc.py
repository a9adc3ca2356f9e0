"""Check the answers of the prompt and adapter RPCs over a socket.

Error texts reveal nothing internal, and a hanging disk blocks only the calls that need it."""

import asyncio
import errno
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import grpc
import pytest
import torch

from tests.support.prompt_files import REQUIRED, age, save_lora
from tgis.pb import shard_pb2 as pb
from tgis.pb.shard_pb2_grpc import ShardServiceStub
from tgis.prompts.artifact_cache import ArtifactCache, Kind
from tgis.prompts.errors import AdapterError, AdapterNotFoundError, MissingArtifactError
from tgis.prompts.store import AdapterStore, ArtifactInfo
from tgis.router.shards.artifact_transfer import copy_artifact
from tgis.shard.adapters.registry import LoadedAdapter, LoadedAdapters, LoadedPrompt
from tgis.shard.server import ShardService, _listen
from tgis.shard.transport.link import UnixEndpoint

TIMEOUT_S = 10
PROMPT = LoadedPrompt(torch.ones(2, 4), torch.empty(0, 4))
Code = grpc.StatusCode
ERRORS = [
    (AdapterError("it is odd"), Code.INVALID_ARGUMENT, "it is odd"),
    (AdapterNotFoundError("it is nowhere"), Code.NOT_FOUND, "it is nowhere"),
    (MissingArtifactError("abc"), Code.NOT_FOUND, "no copy is kept"),
    (MemoryError(), Code.RESOURCE_EXHAUSTED, "out of memory"),
    (torch.OutOfMemoryError("secret"), Code.RESOURCE_EXHAUSTED, "out of memory"),
    (OSError(errno.ENOSPC, "secret"), Code.RESOURCE_EXHAUSTED, "no room is left for a copy"),
    (OSError(errno.EDQUOT, "secret"), Code.RESOURCE_EXHAUSTED, "no room is left for a copy"),
    (OSError(errno.EIO, "bad disk", "/a/path"), Code.INTERNAL, "OSError: [Errno 5] bad disk: '/a/path'"),
    (ValueError("odd"), Code.INTERNAL, "ValueError: odd"),
]


class Answers:
    """How the next calls behave: they block, fail or succeed."""

    error: Exception | None = None

    def __init__(self) -> None:
        self.gate, self.num_waiting, self.num_met = threading.Event(), 0, 0
        self.gate.set()

    def meet(self) -> None:
        self.num_waiting += 1
        self.num_met += 1
        assert self.gate.wait(TIMEOUT_S)
        self.num_waiting -= 1
        if self.error is not None:
            raise self.error


class OddStore(AdapterStore):
    """A store that finds the same prompt under any ID, or fails."""

    def __init__(self, artifacts: ArtifactCache, answers: Answers) -> None:
        super().__init__(artifacts, None, None, None, {})
        self.artifacts, self._answers = artifacts, answers

    def find(self, kind: Kind, id: str) -> ArtifactInfo:
        self._answers.meet()
        if id == "copied":
            digest = self.artifacts.put(kind, {"decoder": torch.ones(2, 4)}, {})
            return ArtifactInfo(kind, digest, 2, 0, 64)
        return ArtifactInfo("adapter" if id == "lora" else kind, f"digest of {id}", 2, 3, 64)


class Served:
    """A service without a model on a socket.

    `finding` and `reading` control how lookups and loads behave."""

    def __init__(self, directory: Path, prompts: Path | None = None) -> None:
        self.finding, self.reading, self.artifacts = (
            Answers(),
            Answers(),
            ArtifactCache(directory / "contents"),
        )
        self.adapters = LoadedAdapters(self._read)
        odd = OddStore(self.artifacts, self.finding)
        store = odd if prompts is None else AdapterStore(self.artifacts, REQUIRED, prompts, None, {})
        service = ShardService(pb.InfoResponse(), store, self.artifacts, self.adapters)
        self.path = directory / "socket"
        self._server = _listen(service, UnixEndpoint(str(self.path)))
        self.channel = grpc.insecure_channel(f"unix:{self.path}")
        self.stub = ShardServiceStub(self.channel)

    def _read(self, digest: str) -> LoadedAdapter:
        self.reading.meet()
        return PROMPT

    def stop(self) -> None:
        self.channel.close()
        self._server.stop(None)

    def find(self, id: str, kind: pb.ContentKind = pb.CONTENT_KIND_PROMPT) -> pb.FindResponse:
        return self.stub.Find(pb.FindRequest(kind=kind, id=id), timeout=TIMEOUT_S)

    def load(self, digest: str) -> None:
        self.stub.Load(pb.LoadRequest(digest=digest), timeout=TIMEOUT_S)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = Served(tmp_path_factory.mktemp("calls"))
    yield served
    served.stop()


@pytest.fixture
def served(one: Served) -> Served:
    one.finding.error = one.reading.error = None
    one.stub.Unload(pb.UnloadRequest(others=True))
    return one


def test_find_returns_a_description(served: Served) -> None:
    expected = pb.FindResponse(
        kind=pb.CONTENT_KIND_PROMPT,
        digest="digest of a/b",
        num_decoder_tokens=2,
        num_encoder_tokens=3,
        num_bytes=64,
    )
    assert served.find("a/b") == expected
    assert served.find("lora").kind == pb.CONTENT_KIND_ADAPTER
    assert served.find("x", pb.CONTENT_KIND_ADAPTER).kind == pb.CONTENT_KIND_ADAPTER


@pytest.mark.parametrize(("error", "code", "text"), ERRORS, ids=[repr(error) for error, *_ in ERRORS])
def test_errors(
    served: Served, error: Exception, code: grpc.StatusCode, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    served.finding.error = served.reading.error = error
    for call in (served.find, served.load):
        with pytest.raises(grpc.RpcError) as caught:
            call("a")
        assert (caught.value.code(), caught.value.details()) == (code, text)
    assert (len(caplog.records) == 0) == (code in (Code.INVALID_ARGUMENT, Code.NOT_FOUND))
    served.finding.error = served.reading.error = None
    assert served.find("a").digest
    served.load("a")
    assert served.adapters.prompt("a") is PROMPT


def test_a_full_disk_is_one_line_for_the_operator(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    served.finding.error = OSError(errno.ENOSPC, "secret")
    with pytest.raises(grpc.RpcError):
        served.find("a")
    [record] = caplog.records
    assert (record.levelname, record.exc_info) == ("ERROR", None)
    assert record.getMessage() == (
        f"{served.artifacts.directory}: no space is left for copies of soft prompts and adapters"
    )


def test_a_digest_that_fails_to_load_is_not_found_again(tmp_path: Path) -> None:
    """Check that a digest which fails to load is found again only after transient errors."""
    prompts = tmp_path / "prompts"
    age(save_lora(prompts / "a"))
    served = Served(tmp_path, prompts)
    try:
        served.reading.error = AdapterError("its rank is odd")
        served.reading.error.__cause__ = OSError("no disk")
        result = served.find("a", pb.CONTENT_KIND_ADAPTER)
        with pytest.raises(grpc.RpcError, match="its rank is odd"):
            served.load(result.digest)
        assert served.find("a", pb.CONTENT_KIND_ADAPTER) == result
        served.reading.error.__cause__ = None
        with pytest.raises(grpc.RpcError, match="its rank is odd"):
            served.load(result.digest)
        with pytest.raises(grpc.RpcError) as caught:
            served.find("a", pb.CONTENT_KIND_ADAPTER)
        text = "can't retrieve adapter with id 'a': its rank is odd"
        assert (caught.value.code(), caught.value.details()) == (Code.INVALID_ARGUMENT, text)
    finally:
        served.stop()


def test_copies_are_removed_with_unloaded_adapters(served: Served) -> None:
    digests = [
        served.artifacts.put("prompt", {"decoder": torch.full((2, 4), float(i))}, {}) for i in range(3)
    ]
    for digest in digests:
        served.load(digest)

    def kept() -> list[bool]:
        results = []
        for digest in digests:
            try:
                served.artifacts.open(digest)
                results.append(True)
            except MissingArtifactError:
                results.append(False)
        assert [served.adapters.prompt(digest) is not None for digest in digests] == results
        return results

    assert kept() == [True, True, True]
    served.stub.Unload(pb.UnloadRequest(digests=digests[:1]))
    assert kept() == [False, True, True]
    served.stub.Unload(pb.UnloadRequest(digests=digests[2:], others=True))
    assert kept() == [False, False, True]


def test_a_copy_from_another_machine(served: Served, tmp_path: Path) -> None:
    """Check that a copy arrives in pieces.

    A truncated or modified copy is dropped, and invalid names never become file paths."""
    other = ArtifactCache(tmp_path / "other")
    digest = other.put("adapter", {"a": torch.arange(1 << 19, dtype=torch.float32)}, {"scales": {}})
    pieces = list(other.read_pieces(digest))
    assert len(pieces) == 3
    requests = [pb.PutRequest(digest=digest, data=piece) for piece in pieces]
    changed = pb.PutRequest(digest=digest, data=b"x" * len(pieces[-1]))
    for wrong in ([], requests[:2], [*requests[:2], changed], [pb.PutRequest(digest="../x", data=b"x")]):
        with pytest.raises(grpc.RpcError) as caught:
            served.stub.Put(iter(wrong), timeout=TIMEOUT_S)
        assert caught.value.code() is Code.NOT_FOUND
        assert digest not in served.artifacts
    served.stub.Put(iter(requests), timeout=TIMEOUT_S)
    assert torch.equal(served.artifacts.open(digest).tensors["a"], other.open(digest).tensors["a"])
    answer = served.stub.Fetch(pb.FetchRequest(digest=digest), timeout=TIMEOUT_S)
    assert [part.data for part in answer] == pieces
    for name in ("0" * 64, "../x"):
        with pytest.raises(grpc.RpcError) as caught:
            list(served.stub.Fetch(pb.FetchRequest(digest=name), timeout=TIMEOUT_S))
        assert caught.value.code() is Code.NOT_FOUND


async def test_relaying_reports_its_failure(served: Served, tmp_path: Path) -> None:
    """Check the error for every failure while many pieces are in transit."""
    target = Served(tmp_path)
    digest = served.artifacts.put("adapter", {"a": torch.zeros(8 << 18)}, {"scales": {}})
    paths = (f"unix:{one.path}" for one in (served, target))
    first, other = (
        grpc.aio.insecure_channel(path, [("grpc.use_local_subchannel_pool", 1)]) for path in paths
    )
    stubs = ShardServiceStub(first), ShardServiceStub(other)
    for _ in range(5):
        await copy_artifact(*stubs, digest, TIMEOUT_S)
        assert digest in target.artifacts
        target.artifacts.remove([digest])
        target.artifacts.directory.rename(tmp_path / "gone")
        target.artifacts.directory.write_text("no directory")
        with pytest.raises(grpc.RpcError) as caught:
            await copy_artifact(*stubs, digest, TIMEOUT_S)
        assert caught.value.code() is Code.INTERNAL
        assert caught.value.details().startswith("FileExistsError: ")
        target.artifacts.directory.unlink()
        (tmp_path / "gone").rename(target.artifacts.directory)
        with pytest.raises(grpc.RpcError) as caught:
            await copy_artifact(*stubs, "0" * 64, TIMEOUT_S)
        assert caught.value.code() is Code.NOT_FOUND
        with pytest.raises(TimeoutError):
            await copy_artifact(*stubs, digest, 0.001)
    relaying = asyncio.create_task(copy_artifact(*stubs, digest, TIMEOUT_S))
    target.stop()
    with pytest.raises((grpc.RpcError, ConnectionError)) as broken:
        await relaying
    if isinstance(broken.value, grpc.RpcError):
        assert broken.value.code() in (Code.UNAVAILABLE, Code.CANCELLED)
    for channel in (first, other):
        await channel.close()


def test_a_copy_without_a_waiting_call_is_removed(served: Served) -> None:
    """Check that an unused copy is removed, but not while it is loaded, since it must then survive a
    restart."""
    digest = served.find("copied").digest
    assert digest in served.artifacts
    give_up_finding(served, "copied")
    deadline = time.monotonic() + TIMEOUT_S
    while digest in served.artifacts:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    served.find("copied")
    served.load(digest)
    give_up_finding(served, "copied")
    assert digest in served.artifacts


def give_up_finding(served: Served, id: str) -> None:
    served.finding.gate.clear()
    with pytest.raises(grpc.RpcError):
        served.stub.Find(pb.FindRequest(kind=pb.CONTENT_KIND_PROMPT, id=id), timeout=0.2)
    served.finding.gate.set()
    deadline = time.monotonic() + TIMEOUT_S
    while served.finding.num_waiting and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.1)  # the next lookup waits behind this one


def test_a_hanging_store_holds_up_finding_alone(served: Served) -> None:
    """Check that more lookups than threads may hang, and that abandoned lookups never start."""
    served.finding.gate.clear()
    served.finding.num_met = 0
    with ThreadPoolExecutor(24) as threads:
        hanging = [threads.submit(served.find, str(i)) for i in range(24)]
        deadline = time.monotonic() + TIMEOUT_S
        while served.finding.num_waiting < 16:  # otherwise the next one might start
            assert time.monotonic() < deadline
            time.sleep(0.01)
        with pytest.raises(grpc.RpcError) as caught:
            served.stub.Find(pb.FindRequest(kind=pb.CONTENT_KIND_PROMPT, id="x"), timeout=0.2)
        assert caught.value.code() == Code.DEADLINE_EXCEEDED
        assert not any(find.done() for find in hanging)
        served.stub.Health(pb.HealthRequest(), timeout=TIMEOUT_S)
        served.stub.Info(pb.InfoRequest(), timeout=TIMEOUT_S)
        served.load("beside")
        served.stub.Unload(pb.UnloadRequest(digests=["beside"]), timeout=TIMEOUT_S)
        assert served.finding.num_waiting == 16
        served.finding.gate.set()
        wait(hanging, TIMEOUT_S)
        assert all(find.result().digest for find in hanging)
    assert served.finding.num_met == 24


def test_loads_of_one_digest_at_once_read_it_once(served: Served) -> None:
    served.reading.gate.clear()
    with ThreadPoolExecutor(6) as threads:
        loads = [threads.submit(served.load, "same") for _ in range(6)]
        while not served.reading.num_waiting:
            threading.Event().wait(0.001)
        served.stub.Health(pb.HealthRequest(), timeout=TIMEOUT_S)
        assert served.reading.num_waiting == 1
        served.reading.gate.set()
        wait(loads, TIMEOUT_S)
        assert [load.exception() for load in loads] == [None] * 6
