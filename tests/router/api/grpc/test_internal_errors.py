"""Tests that every answer with the status INTERNAL has an id, and that the log has the cause with this id.
The client does not get the cause."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from tests.support.router.fake_shard import FakeShard, ShardServer
from tests.support.router.messages import batch, single, stopping
from tests.support.router.model_of_contents import Item, Library, adapter
from tests.support.router.router_process import Setup, start_router, stop_router
from tgis.net.framing import frame
from tgis.pb import generation_pb2 as pb
from tgis.pb import shard_pb2

TOLD = re.compile(r"Request failed during generation: internal error, request ([0-9a-f]{16})")
LONG = stopping(150, min_new_tokens=150)


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    library = Library()
    library.put(Item("p1", 3), "prompt")
    library.put(adapter("a1"), "adapter")
    flags = ["--failpoints", "router.before_accept=raise@1"]
    setup = start_router(tmp_path_factory.mktemp("router"), 1, *flags, library=library)
    yield setup
    assert stop_router(setup) == 0, setup.service.output


def fail_unforeseen(setup: Setup) -> None:
    """Fail by the failpoint, which only the first call reaches."""
    setup.stub.Generate(batch("a"))


def refuse_a_row(setup: Setup) -> None:
    model = setup.shards[0].model
    model.refuses = lambda message: True
    try:
        setup.stub.Generate(batch("a"))
    finally:
        model.refuses = lambda message: False


def end_too_early(setup: Setup) -> None:
    garbage = setup.shards[0].garbage

    def ended(response: shard_pb2.StepResponse) -> bytes:
        garbage.put(ended)  # the answer may belong to a step of the previous call
        response.ended = b"\1" * len(response.ended)
        return frame(response)

    garbage.put(ended)
    try:
        setup.stub.Generate(batch("a", stopping=LONG))
    finally:
        garbage.get(timeout=5)


def die_of_a_row(setup: Setup) -> None:
    setup.shards[0].poison = len(setup.tokenizer.encode("a b c d").ids)
    try:
        setup.stub.Generate(batch("a b c d"))
    finally:
        setup.shards[0].poison = None


def fail_to_find(setup: Setup) -> None:
    setup.library.errors = {(-1, "adapter"): (grpc.StatusCode.INTERNAL, "OSError: bad disk")}
    name_the_adapter(setup)


def fail_to_load(setup: Setup) -> None:
    setup.library.errors = {(0, "a1"): (grpc.StatusCode.UNKNOWN, "a torn file")}
    name_the_adapter(setup)


def name_the_adapter(setup: Setup) -> None:
    try:
        setup.stub.Generate(pb.BatchedGenerationRequest(requests=batch("a").requests, adapter_id="adapter"))
    finally:
        setup.library.errors = {}


def lose_a_prompt(setup: Setup) -> None:
    """Lose the prompt with the shards, and prevent loading it again."""
    setup.shards[0].step_s = 0.01
    request = single("a", stopping=LONG)
    request.prefix_id = "prompt"
    call = setup.stub.GenerateStream(request)
    next(call), next(call)
    setup.servers.pop().stop()
    setup.library.store.clear()
    setup.library.copies.clear()
    setup.shards[:] = [FakeShard(epoch=2, library=setup.library)]
    setup.servers.append(ShardServer(setup.shards[0], setup.uds_path))
    list(call)


CAUSES: dict[str, tuple[Callable[[Setup], None], str]] = {
    "unforeseen": (fail_unforeseen, "InjectedError()"),
    "refused row": (refuse_a_row, "the shards cannot compute it: refused"),
    "ended row": (end_too_early, "the shards ended the sequence too early"),
    "deadly row": (die_of_a_row, "the shards crash whenever they compute it"),
    "look-up": (fail_to_find, "a shard answered INTERNAL: OSError: bad disk"),
    "load": (fail_to_load, "a shard answered UNKNOWN: a torn file"),
    "lost prompt": (lose_a_prompt, "its soft prompt or adapter could not be loaded again"),
}


@pytest.mark.parametrize("name", CAUSES)
def test_the_log_has_the_cause_under_the_id(setup: Setup, name: str) -> None:
    make, cause = CAUSES[name]
    with pytest.raises(grpc.RpcError) as caught:
        make(setup)
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    match = TOLD.fullmatch(caught.value.details())
    assert match, caught.value.details()
    setup.service.wait_for_line(f"request {match[1]} failed: {cause}", 5)
    setup.service.wait_for_line(f"request_id={match[1]} ", 5)  # the call's own log line


def test_failures_outside_of_generations_too(tmp_path: Path) -> None:
    setup = start_router(tmp_path, 1, module="tests.support.router.failing_router")
    try:
        with pytest.raises(grpc.RpcError) as caught:
            setup.stub.ModelInfo(pb.ModelInfoRequest())
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        match = TOLD.fullmatch(caught.value.details())
        assert match, caught.value.details()
        setup.service.wait_for_line(f"request {match[1]} failed: ValueError('no such kind')", 5)
    finally:
        stop_router(setup)
