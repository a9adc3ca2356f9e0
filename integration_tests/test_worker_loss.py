"""Shards that fail in every way during live streams: requests that are not the cause are unaffected."""

import signal
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from tokenizers import Tokenizer

from integration_tests.support.greedy_answers import Model
from integration_tests.support.live_streams import check_survival, metrics, read
from integration_tests.support.service import Client, launch
from tests.support.accounts import assert_nothing_left, differences, take_baseline
from tgis.pb import generation_pb2 as pb

NUM_STREAMS = 4
POISON = "girl fox " * 20  # no other prompt is as long
# One after the other: exceptions and kills end the shards, which restart with the next epoch;
# garbage ends only the link.
FAULTS = (
    "shard.before_answer[epoch=1]=garbage@8",
    "shard.before_forward[epoch=1]=raise@25",
    "shard.after_answer[epoch=2]=kill@20",
)
SLOW_FAULTS = ("shard.before_forward[epoch=1]=oom@20", "shard.before_forward[epoch=2]=sleep:120@20")


def serve_with(model: Model, *faults: str) -> Client:
    flags = ("--dtype", "float32", "--failpoints", ",".join(faults))
    client = Client(launch(model.directory, *flags).wait_until_serving())
    client.stub.ModelInfo(pb.ModelInfoRequest())  # so that its connection exists
    return client


def texts_of(model: Model) -> list[str]:
    return [expected.prompt[:20] for expected in model.expected[:NUM_STREAMS]]


def read_twice(client: Client, texts: list[str]) -> None:
    """Run them first during the faults, and again afterwards."""
    baseline = take_baseline(client.service.http)
    with ThreadPoolExecutor(len(texts)) as threads:
        disturbed = list(threads.map(lambda text: read(client, text), texts))
        assert disturbed == list(threads.map(lambda text: read(client, text), texts))
    assert_nothing_left(client.service.http, baseline)


def end(client: Client) -> None:
    client.channel.close()
    assert client.service.end(signal.SIGTERM) == 0, client.service.output


@pytest.mark.slow
def test_streams_survive_one_fault_after_the_other(model: Model) -> None:
    client = serve_with(model, *FAULTS)
    read_twice(client, texts_of(model))
    assert metrics(client)["tgi_shard_restarts_total"] == len(FAULTS)
    assert len([line for line in client.service.lines if "restarting the shards" in line]) == 2
    assert "was killed by SIGKILL (out of memory?)" in client.service.output
    end(client)


@pytest.mark.slow
def test_only_the_request_that_kills_shards_fails(model: Model) -> None:
    """Streams in the same steps complete, and the log has the request's id."""
    length = len(Tokenizer.from_file(str(model.directory / "tokenizer.json")).encode(POISON).ids)
    client = serve_with(model, f"shard.before_forward[prompt={length}]=raise")
    texts = texts_of(model)
    with ThreadPoolExecutor(len(texts) + 1) as threads:
        streams = [threads.submit(read, client, text) for text in texts]
        culprit = threads.submit(read, client, POISON)
        with pytest.raises(grpc.RpcError) as caught:
            culprit.result(60)
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        disturbed = [stream.result(60) for stream in streams]
        assert disturbed == list(threads.map(lambda text: read(client, text), texts))
    assert not differences(client.service.http, {})
    request_id = caught.value.details().rsplit(" ", 1)[1]
    client.service.wait_for_line(f"request {request_id} failed: the shards crash whenever they compute it", 5)
    assert metrics(client)["tgi_shard_restarts_total"] <= 3
    end(client)


@pytest.mark.slow
def test_streams_survive_a_lack_of_memory_and_a_step_that_hangs(model: Model) -> None:
    client = serve_with(model, *SLOW_FAULTS)
    read_twice(client, texts_of(model))
    assert "shard 0 hung and was killed; restarting the shards" in client.service.output
    end(client)


@pytest.mark.slow
def test_streams_survive_a_shard_that_stands_still(model: Model) -> None:
    service = launch(model.directory, "--dtype", "float32", "--num-shard", "2").wait_until_serving()
    client = Client(service)
    check_survival(client, texts_of(model), victim=1, number=signal.SIGSTOP)
    assert " hung and was killed; restarting the shards" in service.output
    end(client)
