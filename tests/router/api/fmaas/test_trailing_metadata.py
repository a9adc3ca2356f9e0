"""Tests the trailing metadata of calls over a real socket."""

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio

from tests.support.router.messages import PROMPT, batch, single, stopping
from tests.support.router.served_grpc import ServedGrpc, open_grpc
from tgis.pb import generation_pb2 as pb
from tgis.router.api.fmaas.trailing_metadata import TRAILING_KEYS, CallEnd, trailing_metadata
from tgis.router.engine.handle import SequenceSpec
from tgis.router.events import Output, Timings
from tgis.router.sequence import Stopping, StopReason

on_the_fixtures_loop = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ServedGrpc]:
    async with open_grpc(tmp_path_factory.mktemp("served")) as served:
        yield served


async def trailer(call: Any) -> dict[str, str]:
    pairs = [pair for pair in await call.trailing_metadata() if pair[0].startswith("tgis-")]
    assert len(pairs) == len(dict(pairs))
    return dict(pairs)


@on_the_fixtures_loop
async def test_a_unary_call_and_a_stream_end_with_their_times_and_tokens(served: ServedGrpc) -> None:
    num_tokens = {text: len(served.tokenizer.fast.encode(text).ids) for text in (PROMPT, "a", "b c")}
    served.scene.shard.step_s = 0.02
    try:
        unary = served.stub.Generate(batch(PROMPT, "a", "b c", stopping=stopping(4)))
        generated = sum(each.generated_token_count for each in (await unary).responses)
        stream = served.stub.GenerateStream(single(PROMPT, stopping=stopping(4)))
        parts = [part async for part in stream]
    finally:
        served.scene.shard.step_s = 0.001
    expected = ((unary, sum(num_tokens.values()), generated), (stream, num_tokens[PROMPT], 4))
    assert parts[-1].generated_token_count == 4
    for call, num_inputs, num_generated in expected:
        metadata = await trailer(call)
        assert list(metadata) == list(TRAILING_KEYS)
        assert metadata["tgis-prompt-tokens"] == str(num_inputs)
        assert metadata["tgis-generated-tokens"] == str(num_generated)
        assert 0 <= int(metadata["tgis-cached-tokens"]) <= num_inputs
        queue, first, total = (float(metadata[f"tgis-{key}-ms"]) for key in ("queue", "first-token", "total"))
        assert 0 <= queue <= first <= total < 10_000
        assert first >= 20, "a step takes as long"
        assert total >= 80


@on_the_fixtures_loop
async def test_a_call_that_fails_and_others_have_none(served: ServedGrpc) -> None:
    stub, failed = served.stub, grpc.StatusCode.INVALID_ARGUMENT
    for call, code in (
        (stub.Generate(batch("a", stopping=stopping(2000))), failed),
        (stub.GenerateStream(single("a"), metadata=[("tgis-x", "")]), failed),
        (stub.ModelInfo(pb.ModelInfoRequest()), grpc.StatusCode.OK),
        (stub.Tokenize(pb.BatchedTokenizeRequest()), grpc.StatusCode.OK),
    ):
        assert await call.code() is code
        assert await trailer(call) == {}


def end(num_inputs: int, num_generated: int, num_cached: int, *timings: Any) -> CallEnd:
    last = Output((), (), num_generated, StopReason.MAX_TOKENS, "", Timings(*timings), num_cached)
    return CallEnd(SequenceSpec((5,) * num_inputs, Stopping(1)), last)


def test_times_are_the_slowest_ones_and_tokens_are_sums() -> None:
    ends = [end(10, 3, 8, 0.5, 0.75, 2.0), end(4, 0, 0, 1.25, None, 1.25), end(5, 1, 0, 0.0001, 0.9, 1)]
    assert dict(trailing_metadata(ends)) == {
        "tgis-queue-ms": "1250.000",
        "tgis-first-token-ms": "900.000",
        "tgis-total-ms": "2000.000",
        "tgis-prompt-tokens": "19",
        "tgis-cached-tokens": "8",
        "tgis-generated-tokens": "4",
    }
    assert "tgis-first-token-ms" not in dict(trailing_metadata(ends[1:2]))
    nothing = dict(trailing_metadata([]))
    assert {name: float(value) for name, value in nothing.items()} == dict.fromkeys(nothing, 0)
