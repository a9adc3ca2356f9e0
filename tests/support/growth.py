"""Measures a process's memory growth per request, such that small leaks are detected and noise is not."""

import contextlib
import http.client
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count

import grpc
import psutil

from tests.support.router.messages import batch, single, stopping
from tgis.pb import generation_pb2 as pb
from tgis.pb.generation_pb2_grpc import GenerationServiceStub

NUM_SAMPLES = 100
MAX_GROWTH = 20 << 20  # bytes, for NUM_REQUESTS requests
MAX_SHARE = 0.02  # fraction of its memory
NUM_THREADS = 4
NUM_WORDS = 100  # the tokenizer caches up to 10,000 different words, which is no leak


def growth_per_request(pid: int, num_requests: int, serve: Callable[[int], None]) -> tuple[float, float]:
    """Return the bytes of growth per request, by least squares over the second half of the samples, and the
    memory at the end. `serve` makes a number of requests."""
    process, share = psutil.Process(pid), num_requests // NUM_SAMPLES
    samples = []
    for _ in range(NUM_SAMPLES):
        serve(share)
        samples.append(process.memory_info().rss)
    return slope(samples[NUM_SAMPLES // 2 :]) / share, samples[-1]


def slope(values: list[int]) -> float:
    """Return the slope of the least-squares line through the values."""
    middle, mean = (len(values) - 1) / 2, sum(values) / len(values)
    covariance = sum((i - middle) * (value - mean) for i, value in enumerate(values))
    return covariance / sum((i - middle) ** 2 for i in range(len(values)))


def mix(stub: GenerationServiceStub) -> Callable[[int], None]:
    """Return a function that makes a number of requests. Of a hundred inputs, sixty are in batches, twenty
    single, ten streamed, five cancelled and five rejected."""
    numbers = count()

    def twenty() -> None:
        number = next(numbers) % NUM_WORDS
        few = {"stopping": stopping(4)}
        for _ in range(2):
            stub.Generate(batch(*[f"{number} girl {i}" for i in range(6)], **few))
        for i in range(4):
            stub.Generate(batch(f"{number} fox {i}", **few))
        for i in range(2):
            list(stub.GenerateStream(single(f"{number} dog {i}", **few)))
        call = stub.GenerateStream(single(f"{number}", stopping=stopping(100, min_new_tokens=100)))
        next(call), next(call)
        call.cancel()
        with contextlib.suppress(grpc.RpcError):
            stub.Generate(batch("a", stopping=pb.StoppingCriteria(min_new_tokens=21)))

    return partial(_repeat, twenty)


def _repeat(twenty: Callable[[], None], num_requests: int) -> None:
    with ThreadPoolExecutor(NUM_THREADS) as threads:
        for done in [threads.submit(twenty) for _ in range(num_requests // 20)]:
            done.result()


def http_mix(port: int) -> Callable[[int], None]:
    """Return a function that makes a number of requests to OpenAI's API. Of twenty, half are chats, half are
    streamed, one is rejected and one is cut off in its stream."""
    numbers = count()

    def twenty() -> None:
        number = next(numbers) % NUM_WORDS
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=20)) as connection:
            for i in range(18):
                body = {"max_tokens": 4, "stream": i % 4 < 2}
                _post(connection, f"{number} girl {i}", i % 2 == 0, body).read()
            assert _post(connection, "a", False, {"temperature": 99}).read().startswith(b'{"error"')
            long = {"max_tokens": 100, "ignore_eos": True, "stream": True}
            _post(connection, f"{number}", True, long).readline()

    return partial(_repeat, twenty)


def _post(
    connection: http.client.HTTPConnection, text: str, is_chat: bool, body: dict[str, object]
) -> http.client.HTTPResponse:
    chat = {"messages": [{"role": "user", "content": text}]}
    path = "/v1/chat/completions" if is_chat else "/v1/completions"
    connection.request("POST", path, json.dumps(body | (chat if is_chat else {"prompt": text})))
    return connection.getresponse()
