"""Tests which blocks of the cache the subscribers of several tenants and of an operator see, and how they
learn of a drain."""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from tests.support.router.engine_api import EngineApi, serve_engine_api

TOKENS = {"": "of-nobody", "acme": "of-acme", "zeta": "of-zeta"}
OPERATOR = "of-the-operator"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineApi]:
    path = tmp_path_factory.mktemp("tokens") / "tokens"
    write_tokens(path)
    with serve_engine_api(tmp_path_factory.mktemp("router"), "--auth-tokens-path", str(path)) as served:
        yield served


def write_tokens(path: Path) -> None:
    lines = [f"tenant {name} {token}" if name else token for name, token in TOKENS.items()]
    path.write_text("\n".join([*lines, f"operator {OPERATOR}"]))


def token(text: str) -> dict[str, Any]:
    return {"metadata": (("authorization", f"Bearer {text}"),), "timeout": 30}


def generate(served: EngineApi, ids: list[int], holder: str) -> None:
    message = pb.GenerateRequest(
        tokenized=pb.TokenizedInput(input_ids=ids), sampling_params=pb.SamplingParams(max_tokens=1)
    )
    list(served.stub.Generate(message, **token(holder)))


def blocks_of(batches: Iterator[common_pb2.KvEventBatch], count: int) -> set[tuple[str, tuple[int, ...]]]:
    """Return salt and tokens of the next `count` stored blocks."""
    blocks = set()
    while len(blocks) < count:
        for event in next(batches).events:
            salt = event.stored.cache_salt
            blocks |= {(salt, tuple(block.token_ids)) for block in event.stored.blocks}
    return blocks


def test_an_operator_sees_the_blocks_of_all_tenants_and_a_tenant_its_own(served: EngineApi) -> None:
    size = served.setup.shards[0].info.block_size
    ids = served.ids("every word of a long prompt is in the cache " * 5)[: size + 1]
    request = common_pb2.SubscribeKvEventsRequest()
    early = served.stub.SubscribeKvEvents(request, **token(OPERATOR))
    assert next(early).snapshot.count == 1
    for number, holder in enumerate(TOKENS.values()):
        generate(served, [number + 3, *ids[1:]], holder)
    stored = {(name, (number + 3, *ids[1:size])) for number, name in enumerate(TOKENS)}
    assert blocks_of(early, 3) == stored
    late = served.stub.SubscribeKvEvents(request, **token(OPERATOR))
    assert blocks_of(late, 3) == stored
    own = [served.stub.SubscribeKvEvents(request, **token(holder)) for holder in TOKENS.values()]
    for number, stream in enumerate(own):
        assert blocks_of(stream, 1) == {("", (number + 3, *ids[1:size]))}
    for stream in (early, late, *own):
        stream.cancel()


def test_a_subscriber_has_time_to_choose_another_service(served: EngineApi) -> None:
    """This ends the service."""
    stream = served.stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest(), **token(OPERATOR))
    next(stream)
    served.setup.service.process.send_signal(signal.SIGTERM)
    while served.stub.HealthCheck(pb.HealthCheckRequest(), **token(OPERATOR)).healthy:
        pass
    generate(served, served.ids("a prompt"), OPERATOR)
    assert all(batch.sequence_number for batch in stream), "the stream ends without an error"
    assert served.setup.service.process.wait(20) == 0
