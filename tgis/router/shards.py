"""The link to the shards of one model: all ranks get every step, their answers come back as one, in order.
Any rank's failure, and any disagreement between ranks, is a failure of the group."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator

import grpc

from tgis.pb import shard_pb2 as pb
from tgis.pb.shard_pb2_grpc import ShardServiceStub
from tgis.router.columns import Answer, decode_answer, encode_step
from tgis.router.errors import RequestError, RouterError, UnavailableError
from tgis.router.scheduler import Step

LOOKUP_TIMEOUT_S = 5.0
MAX_ID_BYTES = 256
LOST = "Request failed during generation: the model's workers are lost"
RETRY_INTERVAL_S = 0.1
CHANNEL_OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.use_local_subchannel_pool", 1),
]


class ShardsLostError(RouterError):
    """The group cannot answer any more; whatever was in flight is lost."""


class Shards:
    """One long-lived stream per rank. `send` never waits; `receive` gives the answers in the order of the
    steps."""

    def __init__(self, uds_path: str, num_shards: int) -> None:
        self._paths = [f"{uds_path}-{rank}" for rank in range(num_shards)]
        self._channels: list[grpc.aio.Channel] = []
        self._readers: list[asyncio.Task[None]] = []
        self._requests: list[asyncio.Queue[pb.StepRequest]] = []
        self._responses: list[deque[pb.StepResponse]] = []
        self._answers: asyncio.Queue[Answer | ShardsLostError] = asyncio.Queue()
        self._steps: deque[Step] = deque()

    async def connect(self) -> pb.InfoResponse:
        """Waits until all ranks of one start of the group answer, however long that takes; forgets all
        steps."""
        while True:
            await self.close()
            self._channels = [
                grpc.aio.insecure_channel(f"unix:{path}", options=CHANNEL_OPTIONS) for path in self._paths
            ]
            infos = await self._ask_all()
            if infos is not None:
                self._open_streams()
                return infos[0]
            await asyncio.sleep(RETRY_INTERVAL_S)

    def send(self, step: Step) -> None:
        request = encode_step(step)
        self._steps.append(step)
        for queue in self._requests:
            queue.put_nowait(request)

    async def receive(self) -> Answer:
        """The answer to the oldest step that has none yet. Raises ShardsLostError."""
        answer = await self._answers.get()
        if isinstance(answer, ShardsLostError):
            raise answer
        return answer

    async def lookup_prompt(self, prompt_id: str) -> pb.LookupPromptResponse:
        """Raises RequestError with the contract's text, and UnavailableError while the shards are lost."""
        if len(prompt_id.encode()) > MAX_ID_BYTES:  # such a text would not fit into a status
            shown = prompt_id.encode()[:MAX_ID_BYTES].decode(errors="ignore")
            raise _prompt_error(shown, f'prefix id "{shown}" not found')
        if not self._channels:
            raise UnavailableError(LOST)
        call = ShardServiceStub(self._channels[0]).LookupPrompt(
            pb.LookupPromptRequest(prompt_id=prompt_id), timeout=LOOKUP_TIMEOUT_S
        )
        try:
            return await call
        except asyncio.CancelledError:
            if not call.done() or (task := asyncio.current_task()) is None or task.cancelling():
                raise
            raise UnavailableError(LOST) from None  # the link was closed under the call
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise _prompt_error(prompt_id, "Timeout expired") from error
            if error.code() in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INVALID_ARGUMENT):
                raise _prompt_error(prompt_id, error.details() or "") from error
            raise UnavailableError(LOST) from error

    async def close(self) -> None:
        readers, channels = self._readers, self._channels
        self._readers, self._channels, self._requests = [], [], []  # nobody begins a call on what is closing
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
        await asyncio.gather(*(channel.close() for channel in channels))
        self._answers = asyncio.Queue()
        self._steps.clear()

    async def _ask_all(self) -> list[pb.InfoResponse] | None:
        """None while a rank is missing, or left over from an earlier start of the group."""
        stubs = [ShardServiceStub(channel) for channel in self._channels]
        calls = [stub.Info(pb.InfoRequest(), timeout=LOOKUP_TIMEOUT_S) for stub in stubs]
        try:
            infos = [await call for call in calls]
        except grpc.aio.AioRpcError:
            return None
        finally:
            for call in calls:
                call.cancel()
        return infos if len({info.epoch for info in infos}) == 1 else None

    def _open_streams(self) -> None:
        self._responses = [deque() for _ in self._channels]
        self._requests = [asyncio.Queue() for _ in self._channels]
        self._readers = [
            asyncio.create_task(self._read(rank, channel), name=f"shard-{rank}")
            for rank, channel in enumerate(self._channels)
        ]

    async def _read(self, rank: int, channel: grpc.aio.Channel) -> None:
        queue = self._requests[rank]

        async def requests() -> AsyncIterator[pb.StepRequest]:
            while True:
                yield await queue.get()

        try:
            async for response in ShardServiceStub(channel).Step(requests()):
                self._responses[rank].append(response)
                self._combine()
            self._answers.put_nowait(ShardsLostError(f"shard {rank} ended its stream"))
        except grpc.aio.AioRpcError as error:
            self._answers.put_nowait(ShardsLostError(f"shard {rank} is lost: {error.code().name}"))

    def _combine(self) -> None:
        """Passes on the oldest step's answer once all ranks have given theirs."""
        while all(self._responses):
            responses = [queue.popleft() for queue in self._responses]
            step = self._steps.popleft()
            if len({(response.step_id, response.digest) for response in responses}) > 1:
                self._answers.put_nowait(ShardsLostError(f"the ranks disagree on step {step.step_id}"))
                return
            self._answers.put_nowait(decode_answer(step, responses[0]))


def _prompt_error(prompt_id: str, cause: str) -> RequestError:
    return RequestError(f"can't retrieve prompt prefix with id '{prompt_id}': {cause}")
