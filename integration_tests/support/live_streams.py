"""Live streams that must survive the loss of shards."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from integration_tests.support.generations import Keys, metadata_with
from integration_tests.support.service import Client
from tests.support.accounts import assert_nothing_left, scrape, take_baseline
from tests.support.processes import children_of
from tgis.pb import generation_pb2 as pb

LENGTH = 150
START_TIMEOUT_S = 60  # until all streams have a token
NUM_STREAMS = 8


@dataclass(frozen=True)
class Result:
    """Whole stream. `logprobs` has one log-probability per token."""

    text: str
    stop_reason: int
    logprobs: list[float]


def long_request(text: str) -> pb.SingleGenerationRequest:
    """Every second text is sampled."""
    criteria, number = pb.StoppingCriteria(max_new_tokens=LENGTH, min_new_tokens=LENGTH), sum(text.encode())
    details = pb.ResponseOptions(generated_tokens=True, token_logprobs=True)
    params = pb.Parameters(stopping=criteria, response=details)
    if number % 2:
        params.method, params.sampling.seed = pb.SAMPLE, number
    return pb.SingleGenerationRequest(request=pb.GenerationRequest(text=text), params=params)


def keys_of(text: str) -> Keys:
    return metadata_with(sum(text.encode()))


def read(client: Client, text: str, running: threading.Barrier | None = None) -> Result:
    """Read a whole stream; `running` is met after the first token."""
    parts: list[pb.GenerationResponse] = []
    for part in client.stub.GenerateStream(long_request(text), metadata=keys_of(text)):
        if running is not None and len(parts) == 1:
            running.wait(START_TIMEOUT_S)
        parts.append(part)
    logprobs = [token.logprob for part in parts for token in part.tokens]
    assert len(logprobs) == LENGTH
    return Result("".join(part.text for part in parts), parts[-1].stop_reason, logprobs)


def check_survival(
    client: Client, texts: list[str], victim: int, number: signal.Signals = signal.SIGKILL
) -> None:
    """Check that all streams are unchanged when a shard is killed, or stopped, during them."""
    shards = sorted(children_of(client.service.process.pid)["serve"])
    with live_streams(client, texts):
        os.kill(shards[victim], number)
    again = children_of(client.service.process.pid)["serve"]
    assert len(again) == len(shards)
    assert not set(again) & set(shards)


@contextlib.contextmanager
def live_streams(client: Client, texts: list[str], timeout_s: float = 200) -> Iterator[None]:
    """Run streams that lose the shards in the block, and check that they are unchanged and leak nothing."""
    read(client, texts[0])
    baseline = take_baseline(client.service.http)
    num_resumed = client.service.output.count("requests resume")
    with ThreadPoolExecutor(len(texts)) as threads:
        undisturbed = list(threads.map(lambda text: read(client, text), texts))
        running = threading.Barrier(len(texts) + 1)
        streams = [threads.submit(read, client, text, running) for text in texts]
        running.wait(START_TIMEOUT_S)
        assert not any(stream.done() for stream in streams), "they must be running when the shards are lost"
        yield
        try:
            disturbed = [stream.result(timeout_s) for stream in streams]
        except TimeoutError as error:
            raise AssertionError(client.service.output) from error
    assert disturbed == undisturbed
    assert client.service.output.count("requests resume") > num_resumed
    assert_nothing_left(client.service.http, baseline)


def metrics(client: Client) -> dict[str, float]:
    return scrape(client.service.http)
