"""Clients of the service that send a request each at the same time, over one connection per client, and
stream the response; a worker process whose argument is the service's address."""

import asyncio
import sys
from typing import TYPE_CHECKING, Any

import grpc

from bench import worker
from bench.load import CHANNEL_OPTIONS, CONNECT_TIMEOUT_S, Job, ask, make_requests, start_clock
from tgis.pb.generation_pb2_grpc import GenerationServiceStub

if TYPE_CHECKING:
    from tgis.pb.generation_pb2_grpc import GenerationServiceAsyncStub

MODULE = "bench.burst"
TIME_LIMIT_S = 300.0


class Burst:
    def __init__(self, target: str):
        self._target = target
        self._stubs: list[GenerationServiceAsyncStub] = []

    async def run(self, job: Job) -> dict[str, Any]:
        """Time in seconds until all responses are complete, and each client's time to the first token."""
        await self._connect(job.clients)
        requests = make_requests(job)
        asked = [next(requests) for _ in range(job.clients)]
        clock = start_clock()
        answers = await asyncio.gather(
            *(
                ask(stub, job, request, job.new_tokens, index, clock)
                for index, (stub, request) in enumerate(zip(self._stubs, asked, strict=False))
            )
        )
        seconds = clock.read()
        for answer in answers:
            if answer.error or answer.counts[-1:] != [job.new_tokens]:
                raise ValueError(f"an answer of {answer.counts[-1:]} tokens: {answer.error}")
        return {"seconds": seconds, "first_s": [answer.arrivals[0] - answer.sent for answer in answers]}

    async def _connect(self, count: int) -> None:
        while len(self._stubs) < count:
            channel = grpc.aio.insecure_channel(self._target, CHANNEL_OPTIONS)
            await asyncio.wait_for(channel.channel_ready(), CONNECT_TIMEOUT_S)
            self._stubs.append(GenerationServiceStub(channel))


def main() -> None:
    burst, loop = Burst(sys.argv[1]), asyncio.new_event_loop()

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        sizes = {"input_tokens": question["input_tokens"], "new_tokens": question["new_tokens"]}
        job = Job(
            target=sys.argv[1],
            mode="stream",
            clients=question["batch"],
            requests_per_client=1,
            seed=question["seed"],
            time_limit=TIME_LIMIT_S,
            **sizes,
        )
        return loop.run_until_complete(burst.run(job))

    worker.serve(answer)


if __name__ == "__main__":
    main()
