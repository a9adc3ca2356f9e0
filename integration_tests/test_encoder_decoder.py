"""Shared prefixes of an encoder-decoder's requests, and recovery from a lost shard."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from integration_tests.support.generations import assert_same, sampled_with, streamed, unary
from integration_tests.support.greedy_answers import MAX_SEQUENCE_LENGTH, Expected, Model, check
from integration_tests.support.live_streams import NUM_STREAMS, check_survival, metrics
from integration_tests.support.service import Client, serve
from tgis.pb import generation_pb2 as pb

# Enough room for the inputs of all streams, but not for their outputs.
FLAGS = ["--block-size", "8", "--kv-cache-tokens", "520", "--dtype", "float32"]
FLAGS += ["--deployment-framework", "hf_accelerate"]  # the default with which TGIS served such models
QUERIES, HITS = "tgi_prefix_cache_queries", "tgi_prefix_cache_hits"
FIRST_STEP = {"stopping": pb.StoppingCriteria(max_new_tokens=1)}
NUM_ALIKE = 10


@pytest.fixture(scope="module")
def client(encoder_decoder: Model) -> Iterator[Client]:
    length = ["--max-sequence-length", str(MAX_SEQUENCE_LENGTH)]
    yield from serve(encoder_decoder.directory, *FLAGS, *length)


def test_equal_inputs_at_once_and_again(client: Client, encoder_decoder: Model) -> None:
    expected = encoder_decoder.expected[2]

    def ask(i: int) -> pb.GenerationResponse:
        how = unary if i % 2 else streamed
        return how(client, expected, **({} if i < 4 else sampled_with(i)))

    together = ask_together(ask)
    for response in together[:4]:
        check(expected, response)
    for first, again in zip(together, ask_together(ask), strict=True):
        assert_same(first, again, 0)


def ask_together(ask: object) -> list[pb.GenerationResponse]:
    with ThreadPoolExecutor(NUM_ALIKE) as threads:
        return list(threads.map(ask, range(NUM_ALIKE)))  # type: ignore[arg-type]


def test_an_input_is_encoded_once(client: Client, encoder_decoder: Model) -> None:
    """An input with the same beginning is a different one, and another request with the same input shares
    it."""
    *_, one, other = encoder_decoder.expected
    assert one.prompt[:60] == other.prompt[:60]
    assert count_hits(client, one, **FIRST_STEP) == 0
    assert count_hits(client, one, **FIRST_STEP) == len(one.input_pieces)
    assert count_hits(client, other, **FIRST_STEP) == 0
    hits = count_hits(client, one, decoding=pb.DecodingParameters(repetition_penalty=2), **FIRST_STEP)
    assert hits == len(one.input_pieces)


def count_hits(client: Client, expected: Expected, **params: object) -> float:
    """Return the tokens of a request that need no computation; the decoder's first token is always
    computed."""
    before = metrics(client)
    unary(client, expected, **params)
    after = metrics(client)
    assert after[QUERIES] - before[QUERIES] == len(expected.input_pieces) + 1
    return after[HITS] - before[HITS]


@pytest.mark.slow
def test_streams_survive_a_killed_shard(client: Client, encoder_decoder: Model) -> None:
    """Some of them are preempted when the shard dies, and the others afterwards."""
    texts = [expected.prompt[:20] for expected in encoder_decoder.expected[:NUM_STREAMS]]
    before = metrics(client)["tgi_preemptions"]
    check_survival(client, texts, victim=0)
    assert metrics(client)["tgi_preemptions"] > before
    expected = encoder_decoder.expected[0]
    check(expected, unary(client, expected))


def test_all_blocks_are_free_in_the_end(client: Client, encoder_decoder: Model) -> None:
    """Details of inputs too, also of preempted inputs."""
    with ThreadPoolExecutor(len(encoder_decoder.expected)) as threads:
        list(threads.map(lambda expected: streamed(client, expected), encoder_decoder.expected))
    deadline = time.monotonic() + 30
    while metrics(client)["tgi_kv_cache_usage_ratio"]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
