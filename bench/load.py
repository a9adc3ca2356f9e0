"""The load: closed-loop clients in one asyncio process, each with a connection of its own. Run as a child
process with a Job on stdin; prints the Answers as one JSON object."""

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
    """One measurement. Every request has as many input and new tokens."""

    target: str
    mode: Mode
    clients: int
    requests_per_client: int
    input_tokens: int
    new_tokens: int
    seed: int
    """Other seeds give other prompts, so that nothing of an earlier measurement is in the service's cache."""
    time_limit: float
    """Seconds after which no request is sent and those under way are given up."""
    prefix_ids: list[str] = field(default_factory=list)
    """Soft prompts, dealt out to the requests one after the other; an empty id is none."""
    adapter_ids: list[str] = field(default_factory=list)
    every_token: bool = False
    """Whether a token that shows no text, as half a character does not, has a message too."""
    is_sampled: bool = False
    """Whether tokens are drawn with top_k and top_p, as most chats ask for, instead of greedily."""


class Request(NamedTuple):
    """What a client sends, and with which soft prompt and adapter."""

    text: str
    prefix_id: str | None
    adapter_id: str | None


@dataclass
class Answer:
    """What a client saw of one request, in seconds since the clients started; filled as messages arrive."""

    client: int
    sent: float
    arrivals: list[float] = field(default_factory=list)
    """Of every message that brought new tokens."""
    counts: list[int] = field(default_factory=list)
    """Tokens generated up to each of those messages."""
    input_tokens: int = 0
    error: str | None = None
    accepted: float = 0.0
    """When a stream's first message came, which brings no token."""
    ended: float = 0.0
    """When it was over, however it ended."""


@dataclass
class Clock:
    """Seconds since the clients started."""

    start: float

    def read(self) -> float:
        return round(time.perf_counter() - self.start, 6)


def start_clock() -> Clock:
    return Clock(time.perf_counter())


async def run_load(job: Job) -> list[Answer]:
    """Warms up with a short request per client, then measures; failed requests are among the answers."""
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
    """Texts of random words, each long enough for the service to cut it to the length of the job."""
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
    """Failures are noted in the answer."""
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
