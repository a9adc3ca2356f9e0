"""Clients that send requests without pause and know the correct responses. They are not those of
`tgis.load`, which have neither calls of several texts nor stop reasons, and count errors by status alone."""

import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any

import grpc

from integration_tests.chaos.losses import Breaks
from integration_tests.support.greedy_answers import WORDS
from tgis.pb import generation_pb2 as pb
from tgis.pb.generation_pb2_grpc import GenerationServiceStub

TIMEOUT_S = 120.0
OVERLOADED = (grpc.StatusCode.RESOURCE_EXHAUSTED, "Model is overloaded")
# gRPC's text for a connection that ends during a call; the service's own statuses differ.
BROKEN = re.compile("Socket closed|[Cc]onnection reset|Broken pipe|Stream removed|[Cc]onnection refused")
CALLS_OF_A_CHANNEL = 20
LENGTHS = (20, 150)  # tokens of an output

Answer = list[tuple[str, int, Any]]
"""Text, number of tokens and stop reason of each input."""


@dataclass(frozen=True, eq=False)
class Case:
    """Call whose response depends neither on the time nor on other calls."""

    texts: tuple[str, ...]
    params: pb.Parameters
    prefix_id: str | None
    is_stream: bool

    def ask(self, stub: GenerationServiceStub, timeout_s: float = TIMEOUT_S) -> tuple[Answer, float]:
        """Return the response, and the longest time without a message. Raises grpc.RpcError."""
        parts = self.start(stub, timeout_s) if self.is_stream else self._wait(stub, timeout_s)
        return _read(parts)

    def start(self, stub: GenerationServiceStub, timeout_s: float) -> Any:
        """Send the first text as a stream."""
        request = pb.GenerationRequest(text=self.texts[0])
        return stub.GenerateStream(
            pb.SingleGenerationRequest(request=request, params=self.params, prefix_id=self.prefix_id),
            timeout=timeout_s,
        )

    def _wait(self, stub: GenerationServiceStub, timeout_s: float) -> Iterable[Any]:
        requests = [pb.GenerationRequest(text=text) for text in self.texts]
        yield stub.Generate(
            pb.BatchedGenerationRequest(requests=requests, params=self.params, prefix_id=self.prefix_id),
            timeout=timeout_s,
        )


def _read(parts: Iterable[Any]) -> tuple[Answer, float]:
    longest_s, last_at, texts, answer = 0.0, time.monotonic(), [], []
    for part in parts:
        longest_s, last_at = max(longest_s, time.monotonic() - last_at), time.monotonic()
        if isinstance(part, pb.BatchedGenerationResponse):
            return [(r.text, r.generated_token_count, r.stop_reason) for r in part.responses], longest_s
        texts.append(part.text)
        answer = [("".join(texts), part.generated_token_count, part.stop_reason)]
    return answer, longest_s


def make_cases(random: Random, count: int, prefix_id: str) -> list[Case]:
    """Return cases: greedy and sampled with a seed, alone and in batches, streamed and whole, with and
    without a prompt."""
    return [_make_case(random, prefix_id if random.random() < 0.3 else None) for _ in range(count)]


def _make_case(random: Random, prefix_id: str | None) -> Case:
    length = random.randint(*LENGTHS)
    params = pb.Parameters(stopping=pb.StoppingCriteria(max_new_tokens=length, min_new_tokens=length))
    if random.random() < 0.5:
        params.method = pb.SAMPLE
        params.sampling.CopyFrom(
            pb.SamplingParameters(temperature=0.9, top_k=30, top_p=0.95, seed=random.getrandbits(32))
        )
    if random.random() < 0.3:
        params.decoding.repetition_penalty = 1.3
    is_stream = random.random() < 0.6
    num_texts = 1 if is_stream else random.choice((1, 1, 2, 3))
    texts = tuple(" ".join(random.choices(WORDS, k=random.randint(1, 20))) for _ in range(num_texts))
    return Case(texts, params, prefix_id, is_stream)


@dataclass
class Tally:
    """Results of all clients' calls."""

    sent: int = 0
    answered: int = 0
    refused: int = 0
    longest_pause_s: float = 0.0
    broken: int = 0
    """Number of calls lost with the connection to a lost router worker."""
    lost: list[str] = field(default_factory=list)
    """Errors that calls got instead of their response."""
    wrong: list[str] = field(default_factory=list)


class Failure(Exception):
    """Error for a missing response."""

    def __init__(self, text: str, is_overload: bool = False, is_break: bool = False) -> None:
        super().__init__(text)
        self.is_overload, self.is_break = is_overload, is_break
        """`is_break` is true if the connection broke."""


Ask = Callable[[Any], tuple[Answer, float]]
"""Return the response and the longest time without a message. Raises Failure."""


def grpc_asker(connect: Callable[[], grpc.Channel]) -> Callable[[], AbstractContextManager[Ask]]:
    """Return a function that opens a channel and sends calls on it."""

    @contextmanager
    def open_one() -> Iterator[Ask]:
        with connect() as channel:
            stub = GenerationServiceStub(channel)
            yield lambda case: _ask(case, stub)

    return open_one


def _ask(case: Case, stub: GenerationServiceStub) -> tuple[Answer, float]:
    began_at = time.monotonic()
    try:
        return case.ask(stub)
    except grpc.RpcError as error:
        is_overload = (error.code(), error.details()) == OVERLOADED
        is_break = error.code() is grpc.StatusCode.UNAVAILABLE and bool(BROKEN.search(error.details()))
        text = f"{error.code().name} after {time.monotonic() - began_at:.1f} s: {error.details()}"
        raise Failure(text, is_overload, is_break) from error


@dataclass(frozen=True)
class Party:
    """Clients of one kind, their expected responses, and a function that connects one of them."""

    answers: dict[Any, Answer]
    size: int
    open_one: Callable[[], AbstractContextManager[Ask]]


class Traffic:
    """Clients that send the cases in random order, over separate connections, until they are stopped."""

    def __init__(self, parties: Sequence[Party], seed: int, breaks: Breaks) -> None:
        """A call whose connection breaks counts as lost, unless `breaks` allows it."""
        self.tally, self._breaks = Tally(), breaks
        self._lock, self._ending = threading.Lock(), threading.Event()
        clients = [party for party in parties for _ in range(party.size)]
        self._threads = [
            threading.Thread(target=self._work, args=(party, Random(seed * 1000 + i)))
            for i, party in enumerate(clients)
        ]
        for thread in self._threads:
            thread.start()

    def end(self) -> Tally:
        """Wait for the responses of all sent calls."""
        self._ending.set()
        for thread in self._threads:
            thread.join()
        return self.tally

    def _work(self, party: Party, random: Random) -> None:
        cases = list(party.answers)
        while not self._ending.is_set():
            with party.open_one() as ask:
                for _ in range(CALLS_OF_A_CHANNEL):
                    if self._ending.is_set():
                        return
                    case = random.choice(cases)
                    if not self._call(ask, case, party.answers[case]):
                        break

    def _call(self, ask: Ask, case: Any, expected: Answer) -> bool:
        """Return False if the connection is broken. It is not used again, so that it counts as one break."""
        with self._lock:
            self.tally.sent += 1
        try:
            answer, pause_s = ask(case)
        except Failure as failure:
            self._note_failure(failure)
            return not failure.is_break
        with self._lock:
            self.tally.longest_pause_s = max(self.tally.longest_pause_s, pause_s)
            self.tally.answered += 1
            if answer != expected:
                self.tally.wrong.append(f"{answer!r} instead of {expected!r}")
        return True

    def _note_failure(self, failure: Failure) -> None:
        with self._lock:
            if failure.is_overload:
                self.tally.refused += 1
            elif failure.is_break and self._breaks.take():
                self.tally.broken += 1
            else:
                self.tally.lost.append(str(failure))
        time.sleep(0.1)
