"""Drafts change no response of a service: they equal the oracle's, beside other requests in a small cache,
and when the shards die."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from integration_tests.support.greedy_answers import Model, check, request
from integration_tests.support.live_streams import check_survival, keys_of, long_request, metrics
from integration_tests.support.service import Client, serve
from tgis.pb import generation_pb2 as pb

NUM_TOKENS = 60


@pytest.fixture(scope="module")
def client(model: Model) -> Iterator[Client]:
    tight = ["--block-size", "4", "--kv-cache-tokens", "400", "--max-sequence-length", "300"]
    yield from serve(model.directory, "--dtype", "float32", "--speculate", "6", *tight)


def num_drafts(client: Client) -> tuple[float, float]:
    values = metrics(client)
    return values["tgi_speculation_drafted_tokens_total"], values["tgi_speculation_accepted_tokens_total"]


def sample(client: Client, text: str, seed: int, **stopping: object) -> pb.GenerationResponse:
    params = pb.Parameters(method=pb.SAMPLE)
    params.sampling.seed, params.sampling.top_k, params.sampling.temperature = seed, 2, 0.3
    params.stopping.MergeFrom(pb.StoppingCriteria(max_new_tokens=NUM_TOKENS, **stopping))  # type: ignore[arg-type]
    batch = pb.BatchedGenerationRequest(requests=[pb.GenerationRequest(text=text)], params=params)
    return client.stub.Generate(batch).responses[0]


def test_answers_are_the_oracles(client: Client, model: Model) -> None:
    """Send them one after the other, which gains most, and all at once, in a cache too small for that."""

    def ask(expected: object) -> None:
        batch = pb.BatchedGenerationRequest(
            requests=[pb.GenerationRequest(text=expected.prompt)], params=pb.Parameters(**request(expected))
        )
        check(expected, client.stub.Generate(batch).responses[0])

    for expected in model.expected:
        ask(expected)
    drafted, accepted = num_drafts(client)
    assert drafted > accepted > 10
    with ThreadPoolExecutor(len(model.expected)) as threads:
        list(threads.map(ask, model.expected))
    assert metrics(client)["tgi_preemptions"] > 0


@pytest.mark.slow
def test_streams_survive_a_killed_shard(client: Client, model: Model) -> None:
    """Return a greedy request that repeats itself, so that drafts are accepted."""
    texts = (expected.prompt[:20] for expected in model.expected)
    text = next(each for each in texts if not keys_of(each) and long_request(each).params.method == pb.GREEDY)
    before = num_drafts(client)[1]
    check_survival(client, [text], 0)
    assert num_drafts(client)[1] > before


def test_a_stop_sequence_discards_draft_tokens(client: Client, model: Model) -> None:
    """A seed gives the same text, whatever ends it."""
    whole = sample(client, model.expected[0].prompt, 7).text
    stop = whole[len(whole) // 2 :][:3]
    cut = sample(client, model.expected[0].prompt, 7, stop_sequences=[stop])
    assert cut.stop_reason == pb.STOP_SEQUENCE
    assert cut.text == whole[: whole.index(stop) + len(stop)]
