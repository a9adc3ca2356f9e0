"""Generates load: closed-loop clients in one asyncio process, with one connection per client. It runs as a
child process with a Job on stdin, and prints the Answers as one JSON object."""

import asyncio
import json
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import cycle
from typing import TYPE_CHECKING, Literal, NamedTuple

import grpc

from tgis.pb import generation_pb2 as pb
from tgis.pb.generation_pb2_grpc import GenerationServiceStub

if TYPE_CHECKING:
    from tgis.pb.generation_pb2_grpc import GenerationServiceAsyncStub

Mode = Literal["stream", "unary"]
WARM_UP_TOKENS = 8
CONNECT_TIMEOUT_S = 20.0
LETTERS = "etaoinshrdlucmfw"
CHANNEL_OPTIONS = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0))


@dataclass(frozen=True)
class Job:
    """One measurement. Every request has the same numbers of input and new tokens."""

    target: str
    mode: Mode
    clients: int
    requests_per_client: int
    input_tokens: int
    new_tokens: int
    seed: int
    """Seed of the prompts; a new seed avoids hits of an earlier measurement in the service's cache."""
    time_limit: float
    """Time limit in seconds, after which no request is sent and running ones are cancelled."""
    prefix_ids: list[str] = field(default_factory=list)
    """Ids of soft prompts, used by the requests in turn; an empty id means none."""
    adapter_ids: list[str] = field(default_factory=list)
    every_token: bool = False
    """True if a token without text, such as half a character, also gets a message."""
    is_sampled: bool = False
    """True to sample with top_k and top_p, as most chats do; False: greedy."""


class Request(NamedTuple):
    """Request of a client: its text, soft prompt and adapter."""

    text: str
    prefix_id: str | None
    adapter_id: str | None


@dataclass
class Answer:
    """Times of one request as the client sees them, in seconds since the clients started; filled as messages
    arrive."""

    client: int
    sent: float
    arrivals: list[float] = field(default_factory=list)
    """Times of the messages with new tokens."""
    counts: list[int] = field(default_factory=list)
    """Number of generated tokens up to each of those messages."""
    input_tokens: int = 0
    error: str | None = None
    accepted: float = 0.0
    """Time of a stream's first message, which has no token."""
    ended: float = 0.0
    """Time of the end, successful or not."""


@dataclass
class Clock:
    """Return the seconds since the clients started."""

    start: float

    def read(self) -> float:
        return round(time.perf_counter() - self.start, 6)


def start_clock() -> Clock:
    return Clock(time.perf_counter())


async def run_load(job: Job) -> list[Answer]:
    """Warm up with a short request per client, then measure. Failed requests are among the answers."""
    channels = [grpc.aio.insecure_channel(job.target, CHANNEL_OPTIONS) for _ in range(job.clients)]
    try:
        await asyncio.gather(*(asyncio.wait_for(c.channel_ready(), CONNECT_TIMEOUT_S) for c in channels))
        stubs = [GenerationServiceStub(channel) for channel in channels]
        requests = make_requests(job)
        clock = start_clock()
        warm = (ask(stub, job, next(requests), WARM_UP_TOKENS, 0, clock) for stub in stubs)
        await asyncio.gather(*warm)
        clock.start = time.perf_counter()
        lists = await asyncio.gather(
            *(_run_client(i, stub, job, requests, clock) for i, stub in enumerate(stubs))
        )
        return [answer for answers in lists for answer in answers]
    finally:
        await asyncio.gather(*(channel.close() for channel in channels))


def make_prompts(job: Job) -> Iterator[str]:
    """Return texts of random words, long enough for the service to truncate them to the job's length."""
    source = random.Random(job.seed)
    while True:
        words = ("".join(source.choices(LETTERS, k=source.randint(2, 7))) for _ in range(job.input_tokens))
        yield " ".join(words)


def make_requests(job: Job) -> Iterator[Request]:
    ids = zip(cycle(job.prefix_ids or [""]), cycle(job.adapter_ids or [""]), strict=True)
    for text, (prefix_id, adapter_id) in zip(make_prompts(job), ids, strict=True):
        yield Request(text, prefix_id or None, adapter_id or None)


async def _run_client(
    index: int, stub: "GenerationServiceAsyncStub", job: Job, requests: Iterator[Request], clock: Clock
) -> list[Answer]:
    answers = []
    for _ in range(job.requests_per_client):
        if clock.read() >= job.time_limit:
            break
        answers.append(await ask(stub, job, next(requests), job.new_tokens, index, clock))
    return answers


async def ask(
    stub: "GenerationServiceAsyncStub", job: Job, asked: Request, new_tokens: int, client: int, clock: Clock
) -> Answer:
    """Send one request. Failures are recorded in the answer."""
    answer = Answer(client, clock.read())
    timeout = max(0.1, job.time_limit - answer.sent)
    params = pb.Parameters(
        stopping=pb.StoppingCriteria(max_new_tokens=new_tokens, min_new_tokens=new_tokens),
        truncate_input_tokens=job.input_tokens,
        response=pb.ResponseOptions(generated_tokens=job.every_token),
    )
    if job.is_sampled:
        params.method = pb.SAMPLE
        params.sampling.MergeFrom(pb.SamplingParameters(top_k=50, top_p=0.9, temperature=0.8))
    request, ids = pb.GenerationRequest(text=asked.text), (asked.prefix_id, asked.adapter_id)
    try:
        if job.mode == "stream":
            single = pb.SingleGenerationRequest(
                request=request, params=params, prefix_id=ids[0], adapter_id=ids[1]
            )
            async for message in stub.GenerateStream(single, timeout=timeout):
                _note(message, answer, clock)
        else:
            batched = pb.BatchedGenerationRequest(
                requests=[request], params=params, prefix_id=ids[0], adapter_id=ids[1]
            )
            _note((await stub.Generate(batched, timeout=timeout)).responses[0], answer, clock)
    except grpc.aio.AioRpcError as failure:
        answer.error = f"{failure.code().name}: {failure.details()}"
    answer.ended = clock.read()
    return answer


def _note(message: pb.GenerationResponse, answer: Answer, clock: Clock) -> None:
    answer.accepted = answer.accepted or clock.read()
    answer.input_tokens = answer.input_tokens or message.input_token_count
    if message.generated_token_count > (answer.counts[-1] if answer.counts else 0):
        answer.arrivals.append(clock.read())
        answer.counts.append(message.generated_token_count)


def main() -> None:
    job = Job(**json.load(sys.stdin))
    answers = asyncio.run(run_load(job))
    print(json.dumps({"answers": [asdict(answer) for answer in answers], "cpu_s": time.process_time()}))


if __name__ == "__main__":
    main()
