"""Checks that each kind of failure is counted once, under its own label, and logged once."""

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from tests.support.accounts import assert_nothing_left, scrape, take_baseline
from tests.support.router.fake_shard import FakeShard, ShardServer
from tests.support.router.messages import batch, single, stopping
from tests.support.router.router_process import Setup, start_router, stop_router
from tgis.pb import generation_pb2 as pb

TOKEN = (("authorization", "Bearer secret"),)
LOGGERS = {"request_log", "error_interceptor", "auth_interceptor"}
LONG = {"stopping": stopping(150, min_new_tokens=150)}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Setup, dict[str, float]]]:
    home: Path = tmp_path_factory.mktemp("guarded")
    (home / "tokens").write_text("secret\nlimits small requests-per-minute=1\n")
    flags = ["--json-output", "--max-concurrent-requests", "20", "--recovery-timeout", "0.3"]
    flags += ["--trust-metadata", "x-tenant"]
    setup = start_router(home, 1, "--auth-tokens-path", str(home / "tokens"), *flags)
    setup.stub.Generate(batch("a"), metadata=TOKEN)
    yield setup, take_baseline(setup.http)
    assert stop_router(setup) == 0


def records(setup: Setup) -> list[tuple[str, str]]:
    """Return the logger and the level of each warning and error about a call."""
    entries = [json.loads(line) for line in setup.service.lines if line.startswith("{")]
    classes = [(str(each["logger"]).rpartition(".")[2], each["level"]) for each in entries]
    return [each for each in classes if each[0] in LOGGERS and each[1] != "INFO"]


def failures(setup: Setup) -> Counter[str]:
    name = "tgi_request_failure_total"
    samples = scrape(setup.http).items()
    return Counter({key.split('"')[1]: int(value) for key, value in samples if key.startswith(name)})


def generate(setup: Setup, *texts: str, **more: object) -> None:
    setup.stub.Generate(batch(*texts, **more), metadata=TOKEN)


def be_cancelled(setup: Setup) -> None:
    call = setup.stub.GenerateStream(single("a", **LONG), metadata=TOKEN)
    next(call), next(call)
    call.cancel()
    next(call)


def be_late(setup: Setup) -> None:
    setup.stub.Generate(batch("a", **LONG), metadata=TOKEN, timeout=1.5)


def be_refused_by_a_shard(setup: Setup) -> None:
    model = setup.shards[0].model
    model.refuses = lambda message: True
    try:
        generate(setup, "a")
    finally:
        model.refuses = lambda message: False


def exceed_a_limit(setup: Setup) -> None:
    metadata = (*TOKEN, ("x-tenant", "small"))
    setup.stub.Generate(batch("a"), metadata=metadata)
    setup.stub.Generate(batch("a"), metadata=metadata)


def lose_the_shards(setup: Setup) -> None:
    call = setup.stub.GenerateStream(single("a", **LONG), metadata=TOKEN)
    next(call), next(call)
    setup.servers.pop().stop()
    try:
        list(call)
    finally:
        setup.shards[:] = [FakeShard(epoch=2)]
        setup.servers.append(ShardServer(setup.shards[0], setup.uds_path))


def send_garbage(setup: Setup) -> None:
    setup.channel.unary_unary("/fmaas.GenerationService/Generate")(b"\xff\xff\xff\x01", metadata=TOKEN)


def show_a_wrong_token(setup: Setup) -> None:
    setup.stub.Generate(batch("a"), metadata=(("authorization", "Bearer guess"),))


Status = grpc.StatusCode
CLASSES: dict[str, tuple[Callable[[Setup], None], grpc.StatusCode, str, tuple[str, str]]] = {
    "validation": (
        lambda setup: generate(setup, "a", "b", stopping=pb.StoppingCriteria(min_new_tokens=21)),
        *(Status.INVALID_ARGUMENT, "validation", ("request_log", "ERROR")),
    ),
    "too many": (
        lambda setup: generate(setup, *["a"] * 21),
        *(Status.RESOURCE_EXHAUSTED, "conc_limit", ("request_log", "ERROR")),
    ),
    "too often": (exceed_a_limit, Status.RESOURCE_EXHAUSTED, "tenant_limit", ("request_log", "ERROR")),
    "cancelled": (be_cancelled, Status.CANCELLED, "cancelled", ("request_log", "WARNING")),
    "late": (be_late, Status.DEADLINE_EXCEEDED, "cancelled", ("request_log", "WARNING")),
    "refused row": (be_refused_by_a_shard, Status.INTERNAL, "generate", ("request_log", "ERROR")),
    "lost shards": (lose_the_shards, Status.UNAVAILABLE, "generate", ("request_log", "ERROR")),
    "garbage": (send_garbage, Status.INVALID_ARGUMENT, "validation", ("error_interceptor", "ERROR")),
    "wrong token": (
        show_a_wrong_token,
        Status.UNAUTHENTICATED,
        "unauthenticated",
        ("auth_interceptor", "WARNING"),
    ),
}


@pytest.mark.parametrize("name", CLASSES)
def test_once_each(guarded: tuple[Setup, dict[str, float]], name: str) -> None:
    setup, baseline = guarded
    make, code, label, record = CLASSES[name]
    setup.shards[0].step_s = 0.02
    counted, num_records = failures(setup), len(records(setup))
    with pytest.raises(grpc.RpcError) as caught:
        make(setup)
    assert caught.value.code() is code
    deadline = time.monotonic() + 30
    while not (failures(setup) - counted and len(records(setup)) > num_records):
        assert time.monotonic() < deadline, (failures(setup) - counted, records(setup)[num_records:])
        time.sleep(0.02)
    assert_nothing_left(setup.http, baseline)
    assert failures(setup) - counted == Counter([label])
    assert records(setup)[num_records:] == [record]
