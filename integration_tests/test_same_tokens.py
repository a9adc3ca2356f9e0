"""Equal requests give transformers' tokens: alone, among other requests, chunked, preempted, from the cache,
on one rank and on two, unary and streamed; with a decoder-only model and an encoder-decoder."""

import random
import re
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from integration_tests.support.generations import assert_same, metadata_with, sampled_with, streamed, unary
from integration_tests.support.greedy_answers import MAX_SEQUENCE_LENGTH, Expected, Model, check
from integration_tests.support.service import Client, serve
from tgis.pb import generation_pb2 as pb

# Small enough that long prompts are chunked, that all requests do not fit into the cache, and that prefixes
# are shared.
TIGHT = ["--block-size", "8", "--kv-cache-tokens", "320", "--max-step-tokens", "24", "--max-batch-size", "12"]
LENGTH = ["--dtype", "float32", "--max-sequence-length", str(MAX_SEQUENCE_LENGTH)]
SERVICES = {
    "one rank": [],
    "one rank, tight": TIGHT,
    "two ranks, tight": [*TIGHT, "--num-shard", "2"],
    "lock step": [*TIGHT, "--steps-in-flight", "1"],
    "encoder-decoder, one rank": [],
    "encoder-decoder, one rank, tight": TIGHT,
    "encoder-decoder, two ranks, tight": [*TIGHT, "--num-shard", "2"],
}
# The cases are also sent to a launched encoder-decoder.
SLOW = {
    "one rank",
    "one rank, tight",
    "lock step",
    "encoder-decoder, one rank",
    "encoder-decoder, one rank, tight",
    "encoder-decoder, two ranks, tight",
}
SERVED = [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in SERVICES]


@pytest.fixture(scope="module", params=SERVED)
def service(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, service: str, model: Model) -> Model:
    chosen: Model = request.getfixturevalue("encoder_decoder") if "encoder" in service else model
    return chosen


@pytest.fixture(scope="module")
def client(service: str, model: Model) -> Iterator[Client]:
    yield from serve(model.directory, *LENGTH, *SERVICES[service])


def test_alone(client: Client, model: Model) -> None:
    for expected in model.expected[:3]:
        check(expected, unary(client, expected))


def test_in_a_crowd(client: Client, model: Model) -> None:
    """Send them twice, so that the second time uses the cache."""
    for seed in range(2):
        r = random.Random(seed)
        asks = [(expected, r.choice((unary, streamed)), r.random() * 0.05) for expected in model.expected]
        r.shuffle(asks)

        def ask(item: tuple[Expected, object, float]) -> pb.GenerationResponse:
            expected, how, delay = item
            time.sleep(delay)
            return how(client, expected)  # type: ignore[operator]

        with ThreadPoolExecutor(len(asks)) as threads:
            for (expected, *_), response in zip(asks, threads.map(ask, asks), strict=True):
                check(expected, response)


def test_from_the_cache(client: Client, model: Model) -> None:
    """Input details are left out, because they are never read from the cache."""
    options = pb.ResponseOptions(generated_tokens=True, token_logprobs=True)
    for expected in model.expected[-7:]:
        response = unary(client, expected, response=options)
        num = expected.certain
        assert [token.text for token in response.tokens][:num] == expected.pieces[:num]
        given = [token.logprob for token in response.tokens][:num]
        assert given == pytest.approx(expected.logprobs[:num], rel=1e-4, abs=1e-4)


@pytest.mark.slow
def test_seeded_answers_depend_on_nothing_else(
    client: Client, model: Model, first_answers: dict[tuple[str, int], pb.GenerationResponse]
) -> None:
    """Results depend, bit for bit, neither on other requests, chunks, preemption and the cache nor on
    streaming; nor, up to the rounding of sums over two ranks, on the service."""

    def ask(i: int) -> pb.GenerationResponse:
        how = unary if i % 2 else streamed
        return how(client, model.expected[i], metadata_with(i), **sampled_with(i))

    alone = [ask(i) for i in range(NUM_SAMPLED)]
    with ThreadPoolExecutor(2 * NUM_SAMPLED) as threads:
        others = [threads.submit(unary, client, other) for other in model.expected[NUM_SAMPLED:]]
        crowded = list(threads.map(ask, range(NUM_SAMPLED)))
        for other in others:
            other.result()
    for i, (one, other) in enumerate(zip(alone, crowded, strict=True)):
        assert_same(one, other, 0)
        first = first_answers.setdefault((model.directory.name, i), one)
        assert_same(one, first, 1e-4)


@pytest.mark.slow
def test_another_seed_gives_another_answer(client: Client, model: Model) -> None:
    texts = {
        unary(client, model.expected[0], method=pb.SAMPLE, sampling=pb.SamplingParameters(seed=seed)).text
        for seed in range(5)
    }
    assert len(texts) == 5


NUM_SAMPLED = 14


@pytest.fixture(scope="module")
def first_answers() -> dict[tuple[str, int], pb.GenerationResponse]:
    return {}


@pytest.mark.slow
def test_the_tight_services_are_tight(client: Client, service: str) -> None:
    """Otherwise the tests above would not cover their subjects; this test runs last."""
    with urllib.request.urlopen(client.service.http + "/metrics", timeout=10) as response:
        match = re.search(r"^tgi_preemptions (\S+)", response.read().decode(), re.MULTILINE)
    is_tight = not service.endswith("one rank")
    assert (match is not None and float(match[1]) > 0) == is_tight
