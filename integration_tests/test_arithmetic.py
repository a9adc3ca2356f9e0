"""A service with other arithmetic than float32 has bit-identical results alone, among other requests, in
chunks, from the cache, unary and streamed; with `--cpu-arithmetic bfloat16`, they are close to transformers
in float32."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from integration_tests.support.generations import assert_same, metadata_with, sampled_with, streamed, unary
from integration_tests.support.greedy_answers import MAX_SEQUENCE_LENGTH, Model
from integration_tests.support.service import Client, serve

pytestmark = pytest.mark.slow

LENGTH = ["--dtype", "float32", "--max-sequence-length", str(MAX_SEQUENCE_LENGTH)]
# Small enough that prompts are chunked, and that all requests do not fit into the cache.
TIGHT = ["--block-size", "8", "--kv-cache-tokens", "320", "--max-step-tokens", "24", "--max-batch-size", "12"]
TOLERANCE = 0.02  # maximum mean difference of log-probabilities
NUM_SAMPLED = 9
BFLOAT16 = ("--cpu-arithmetic", "bfloat16")
WAYS = {
    "bfloat16": BFLOAT16,
    "int8": ("--quantize", "int8"),
    "int8 and bfloat16": ("--quantize", "int8", *BFLOAT16),
    "int4": ("--quantize", "int4"),
    "int4 and int8 activations": ("--quantize", "int4", "--activations", "int8"),
    "nf4": ("--quantize", "bitsandbytes-nf4"),
    "8 bits, weights only": ("--quantize", "bitsandbytes"),
    "fp8 cache": ("--kv-cache-dtype", "fp8_e4m3"),
    "int8 cache": ("--kv-cache-dtype", "int8"),
}


@pytest.fixture(scope="module", params=WAYS.values(), ids=WAYS)
def client(request: pytest.FixtureRequest, model: Model) -> Iterator[Client]:
    yield from serve(model.directory, *request.param, *LENGTH, *TIGHT)


@pytest.mark.parametrize("client", [BFLOAT16], ids=["bfloat16"], indirect=True)
def test_input_logprobs_are_near_float32(client: Client, model: Model) -> None:
    differences = []
    for expected in model.expected:
        tokens = unary(client, expected).input_tokens[1:]
        assert [token.text for token in tokens] == expected.input_pieces[1:]
        pairs = zip(tokens, expected.input_logprobs, strict=True)
        differences += [abs(token.logprob - logprob) for token, logprob in pairs]
    assert 0 < sum(differences) / len(differences) < TOLERANCE


def test_answers_depend_on_nothing_else(client: Client, model: Model) -> None:
    alone = [
        unary(client, model.expected[i], metadata_with(i), **sampled_with(i)) for i in range(NUM_SAMPLED)
    ]
    with ThreadPoolExecutor(2 * NUM_SAMPLED) as threads:
        others = [threads.submit(unary, client, other) for other in model.expected[NUM_SAMPLED:]]
        crowded = [
            threads.submit(streamed, client, model.expected[i], metadata_with(i), **sampled_with(i))
            for i in range(NUM_SAMPLED)
        ]
        for other in others:
            other.result()
    for one, other in zip(alone, crowded, strict=True):
        assert_same(one, other.result(), 0)
