"""The same request gives the same tokens as transformers: alone, in a crowd, chunked, preempted, from the
cache, on one rank and on two, unary and streamed."""

import random
import re
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from integration_tests.conftest import Client, Expected, Model, check, request, serve
from tgis.pb import generation_pb2 as pb

# Small enough that long prompts are cut, that the crowd does not fit into the cache, and that prefixes are
# shared.
TIGHT = ["--block-size", "8", "--kv-cache-tokens", "320", "--max-step-tokens", "24", "--max-batch-size", "12"]
SERVICES = {
    "one rank": [],
    "one rank, tight": TIGHT,
    "two ranks, tight": [*TIGHT, "--num-shard", "2"],
    "lock step": [*TIGHT, "--steps-in-flight", "1"],
}


@pytest.fixture(scope="module", params=SERVICES)
def client(request: pytest.FixtureRequest, model: Model) -> Iterator[Client]:
    yield from serve(model.directory, "--dtype", "float32", *SERVICES[request.param])


def unary(client: Client, expected: Expected, **params: object) -> pb.GenerationResponse:
    message = pb.BatchedGenerationRequest(
        requests=[pb.GenerationRequest(text=expected.prompt)],
        params=pb.Parameters(**request(expected, **params)),
    )
    [response] = client.stub.Generate(message).responses
    return response


def streamed(client: Client, expected: Expected) -> pb.GenerationResponse:
    """The messages of a stream put together again."""
    message = pb.SingleGenerationRequest(
        request=pb.GenerationRequest(text=expected.prompt), params=pb.Parameters(**request(expected))
    )
    whole = pb.GenerationResponse()
    for part in client.stub.GenerateStream(message):
        text = whole.text + part.text
        whole.MergeFrom(part)
        whole.text = text
    return whole


def test_alone(client: Client, model: Model) -> None:
    for expected in model.expected[:3]:
        check(expected, unary(client, expected))


def test_in_a_crowd(client: Client, model: Model) -> None:
    """Twice, so that the second time meets what the first has left in the cache."""
    for seed in range(2):
        r = random.Random(seed)
        asks = [(expected, r.choice((unary, streamed)), r.random() * 0.5) for expected in model.expected]
        r.shuffle(asks)

        def ask(item: tuple[Expected, object, float]) -> pb.GenerationResponse:
            expected, how, delay = item
            time.sleep(delay)
            return how(client, expected)  # type: ignore[operator]

        with ThreadPoolExecutor(len(asks)) as threads:
            for (expected, *_), response in zip(asks, threads.map(ask, asks), strict=True):
                check(expected, response)


def test_from_the_cache(client: Client, model: Model) -> None:
    """Without input details, which are never read from the cache."""
    options = pb.ResponseOptions(generated_tokens=True, token_logprobs=True)
    for expected in model.expected[-7:]:
        response = unary(client, expected, response=options)
        num = expected.certain
        assert [token.text for token in response.tokens][:num] == expected.pieces[:num]
        given = [token.logprob for token in response.tokens][:num]
        assert given == pytest.approx(expected.logprobs[:num], rel=1e-4, abs=1e-4)


def test_sampling_depends_on_the_seed_alone(
    client: Client, model: Model, sampled: dict[str, list[str]]
) -> None:
    """Not on company, and not on which service of this module it is."""

    def sample(seed: int) -> list[str]:
        sampling = pb.SamplingParameters(seed=seed, temperature=0.9, top_k=40, top_p=0.95)
        response = unary(client, model.expected[0], method=pb.SAMPLE, sampling=sampling)
        return [token.text for token in response.tokens]

    alone = sample(11)
    with ThreadPoolExecutor(8) as threads:
        others = [threads.submit(unary, client, other) for other in model.expected[1:7]]
        crowded = sample(11)
        for other in others:
            other.result()
    assert alone == crowded == sampled.setdefault("seed 11", alone)
    assert sample(12) != alone


@pytest.fixture(scope="module")
def sampled() -> dict[str, list[str]]:
    return {}


def test_the_tight_services_are_tight(client: Client, request: pytest.FixtureRequest) -> None:
    """Else the tests above would not show what they are for; runs last."""
    with urllib.request.urlopen(client.service.http + "/metrics", timeout=10) as response:
        found = re.search(r"^tgi_preemptions (\S+)", response.read().decode(), re.MULTILINE)
    is_tight = request.node.callspec.params["client"] != "one rank"
    assert (found is not None and float(found[1]) > 0) == is_tight
