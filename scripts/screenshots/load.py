"""Runs a service of a real model with soft prompts and adapters, and clients: few, then many, then too many,
and kills a shard meanwhile."""

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import grpc

from integration_tests.support.service import launch
from integration_tests.support.tuned_files import LINEAR, SoftPrompt, embeddings, write_adapter, write_prompt
from tests.support.processes import Service, children_of
from tgis.pb import generation_pb2 as pb
from tgis.pb.generation_pb2_grpc import GenerationServiceStub

WORDS = (
    "with statement is used to wrap the execution of a block list function returns value class method".split()
)
LOAD_S = 95.0
KILL_AFTER_S = 70.0
WIDTH = 576  # width of the model's embeddings
NUM_CONTENTS = 3
# Numbers of clients, by the second from which on they run.
CLIENTS = ((0.0, 3), (20.0, 12), (35.0, 20), (60.0, 10), (85.0, 4))
FLAGS = ["--max-concurrent-requests", "18", "--max-batch-size", "8", "--block-size", "8"]
FLAGS += ["--max-sequence-length", "256", "--max-new-tokens", "128", "--kv-cache-tokens", "1536"]
FLAGS += ["--speculate", "2"]
KEYS = (
    (),
    (("tgis-presence-penalty", "0.5"),),
    (("tgis-logit-bias", "7:-1"),),
    (("tgis-cache-salt", "other"),),
)
KEY_WEIGHTS = (16, 3, 2, 1)


@contextmanager
def serve_model(model: Path, directory: Path) -> Iterator[Service]:
    prompts, adapters = directory / "prompts", directory / "adapters"
    for i in range(NUM_CONTENTS):
        write_prompt(prompts / f"p{i}", SoftPrompt(embeddings(8, i, WIDTH)))
        write_adapter(adapters / f"a{i}", model, i, LINEAR)
    contents = ["--prefix-store-path", str(prompts), "--adapter-cache", str(adapters)]
    service = launch(model, *FLAGS, *contents).wait_until_serving()
    try:
        yield service
    finally:
        service.end()


class Load:
    """Run closed-loop clients during the block."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._stop = threading.Event()
        max_clients = max(count for _, count in CLIENTS)
        self._threads = [threading.Thread(target=self._ask, args=(i,)) for i in range(max_clients)]
        self._killer = threading.Thread(target=self._kill)
        self.began_at = 0.0

    def __enter__(self) -> "Load":
        self.began_at = time.time()
        for thread in (*self._threads, self._killer):
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        for thread in (*self._threads, self._killer):
            thread.join()

    @property
    def age_s(self) -> float:
        return time.time() - self.began_at

    def wait_until(self, age_s: float) -> None:
        time.sleep(max(age_s - self.age_s, 0.0))

    def _num_clients(self) -> int:
        return next(count for since, count in reversed(CLIENTS) if self.age_s >= since)

    def _ask(self, number: int) -> None:
        r = random.Random(number)
        with self._service.channel() as channel:
            stub = GenerationServiceStub(channel)
            while not self._stop.is_set():
                if number >= self._num_clients():
                    self._stop.wait(0.2)
                    continue
                try:
                    self._ask_once(stub, r)
                except grpc.RpcError:  # refused, as intended for some requests
                    self._stop.wait(0.3)
                self._stop.wait(r.uniform(0.0, 0.4))

    def _ask_once(self, stub: GenerationServiceStub, r: random.Random) -> None:
        request, params, content = _request(r)
        metadata = r.choices(KEYS, KEY_WEIGHTS)[0]
        if r.random() < 0.8:
            one = pb.SingleGenerationRequest(request=request, params=params, **content)
            for _ in stub.GenerateStream(one, metadata=metadata):
                pass
        else:
            requests = [request] * r.randint(1, 2)
            batch = pb.BatchedGenerationRequest(requests=requests, params=params, **content)
            stub.Generate(batch, metadata=metadata)

    def _kill(self) -> None:
        self._stop.wait(KILL_AFTER_S)
        if not self._stop.is_set():
            os.kill(children_of(self._service.process.pid)["serve"][0], signal.SIGKILL)


def _request(r: random.Random) -> tuple[pb.GenerationRequest, pb.Parameters, dict[str, str]]:
    """Return a request; one in thirty is refused."""
    beginning = "The with statement is used to wrap the execution of a block. " * r.randint(0, 2)
    text = beginning + " ".join(r.choices(WORDS, k=r.randint(5, 40)))
    tokens = r.randint(10, 110) if r.random() > 0.03 else 100_000
    stopping = pb.StoppingCriteria(max_new_tokens=tokens, stop_sequences=["."] if r.random() < 0.2 else [])
    content = r.choices(
        [{}, {"prefix_id": f"p{r.randrange(NUM_CONTENTS)}"}, {"adapter_id": f"a{r.randrange(NUM_CONTENTS)}"}],
        [8, 1, 1],
    )[0]
    return pb.GenerationRequest(text=text), pb.Parameters(stopping=stopping), content
