"""Active streams through a router, read by threads."""

import threading
from concurrent.futures import Future, ThreadPoolExecutor

import grpc

from tests.support.router.expected_answers import expected_text, expected_tokens
from tests.support.router.messages import single, stopping
from tests.support.router.router_process import Setup

NUM_STREAMS = 8
LENGTH = 60


class Streams:
    """Active streams, each read by its own thread."""

    def __init__(
        self, setup: Setup, count: int = NUM_STREAMS, step_s: float = 0.01, length: int = LENGTH
    ) -> None:
        self.setup, self.length = setup, length
        for shard in setup.shards:
            shard.step_s = step_s
        self.texts = [f"{i} little girls" for i in range(count)]
        self.started = threading.Barrier(count + 1)
        self._threads = ThreadPoolExecutor(count)
        self._results: list[Future[str]] = [self._threads.submit(self._read, text) for text in self.texts]
        self.started.wait(60)

    def _read(self, text: str) -> str:
        parts, waited = [], False
        for response in self.setup.stub.GenerateStream(single(text, stopping=stopping(self.length))):
            parts.append(response.text)
            if response.generated_token_count and not waited:
                waited = True
                self.started.wait(60)
        return "".join(parts)

    def results(self) -> list[str]:
        with self._threads:
            return [result.result(120) for result in self._results]

    def failures(self) -> list[grpc.RpcError]:
        with self._threads:
            return [result.exception(120) for result in self._results]  # type: ignore[misc]

    def errors(self) -> list[grpc.StatusCode]:
        return [failure.code() for failure in self.failures()]

    def expected(self) -> list[str]:
        tokens = [expected_tokens(self.setup, text, self.length) for text in self.texts]
        return [expected_text(self.setup, each) for each in tokens]
