"""Client of the shards of one model. All ranks get every step, and their answers are combined in order. A
failure of any rank, or a disagreement between ranks, is a failure of the group."""

import asyncio
import logging
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import Message

from tgis.net.framed_channel import FramedChannel
from tgis.pb import shard_pb2 as pb
from tgis.pb.shard_pb2_grpc import ShardServiceStub
from tgis.router.errors import RouterError
from tgis.router.scheduling.step import Step
from tgis.router.sequence import AdapterInfo, AdapterKind
from tgis.router.shards.artifact_transfer import copy_artifact
from tgis.router.shards.codec import StepAnswer, decode_answer, encode_step
from tgis.router.shards.link import ShardLink

logger = logging.getLogger(__name__)

INFO_TIMEOUT_S = 5.0
ALIVE_TIMEOUT_S = 1.0
UNLOAD_TIMEOUT_S = 60.0
LOST = "Request failed during generation: the model's workers are lost"
LOST_CODES = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
RETRY_INTERVAL_S = 0.1


class ShardsLostError(RouterError):
    """Error when the shard group is lost, with all steps in flight."""


class AdapterCallError(Exception):
    """Error when a rank fails to find, load or unload an adapter."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(f"{code.name}: {details}")
        self.code = code
        self.details = details


class ShardClient:
    """Connection to every rank of a shard group, with one long-lived step stream per rank. `send` never
    waits; `receive` returns answers in the order of the steps."""

    def __init__(self, link: ShardLink) -> None:
        self._link = link
        self._logged: set[tuple[int, str]] = set()
        self._channels: list[grpc.aio.Channel] = []
        self._closing: set[asyncio.Task[None]] = set()
        self._streams: list[FramedChannel[pb.StepResponse]] = []
        self._responses: list[deque[pb.StepResponse]] = []
        """Responses of each rank to the oldest steps."""
        self._answers: deque[StepAnswer | ShardsLostError] = deque()
        self._arrival: asyncio.Future[None] | None = None
        """Future that `receive` awaits."""
        self._steps: deque[Step] = deque()
        self._settling: deque[tuple[Step, asyncio.Future[None]]] = deque()
        self.replaced_kernels: frozenset[str] = frozenset()
        """Names of kernels that some rank had replaced at the last connection."""

    async def connect(self) -> pb.InfoResponse:
        """Wait, without a time limit, until all ranks of one start of the group answer. Forget earlier
        steps."""
        while True:
            await self.close()
            self._channels = self._link.open_channels()
            infos = await self._ask_infos()
            if infos is not None and await self._open_streams():
                self._logged.clear()
                self.replaced_kernels = frozenset(name for info in infos for name in info.replaced_kernels)
                return infos[0]
            await asyncio.sleep(RETRY_INTERVAL_S)

    def send(self, step: Step, timeout_s: float) -> None:
        """Send a step to all ranks. A rank that computes longer than `timeout_s` is killed; 0: no limit."""
        request = encode_step(step, timeout_s).SerializeToString()
        self._steps.append(step)
        for stream in self._streams:
            stream.send_now([request])

    async def receive(self) -> StepAnswer:
        """Return the answer to the oldest unanswered step. Raises ShardsLostError."""
        while not self._answers:
            self._arrival = asyncio.get_running_loop().create_future()
            await self._arrival
        answer = self._answers.popleft()
        if isinstance(answer, ShardsLostError):
            raise answer
        return answer

    async def settle(self) -> None:
        """Wait until all ranks have answered every step sent so far, or the shards are lost."""
        if self._steps:
            settled = asyncio.get_running_loop().create_future()
            self._settling.append((self._steps[-1], settled))
            await settled

    async def find(self, kind: AdapterKind, adapter_id: str, timeout_s: float) -> AdapterInfo:
        """Find an adapter by its id on the first rank. Raises AdapterCallError and ShardsLostError."""
        request = pb.FindRequest(kind=pb.ContentKind.Name(kind.value), id=adapter_id)
        [adapter] = answers = await self._ask("Find", request, timeout_s, [0])
        _raise_worst(answers)
        return AdapterInfo(
            AdapterKind(adapter.kind),
            adapter.digest,
            adapter.num_decoder_tokens,
            adapter.num_encoder_tokens,
            adapter.num_bytes,
        )

    async def load(self, digest: str, timeout_s: float) -> None:
        """Load an adapter on all ranks, and return or raise only when no rank is loading it any more. Ranks
        on machines without a copy get the first rank's copy. Raises AdapterCallError and ShardsLostError."""
        request = pb.LoadRequest(digest=digest)
        answers = await self._ask("Load", request, timeout_s)
        if not _is_missing(answers[0]):
            for rank in [rank for rank, answer in enumerate(answers) if _is_missing(answer)]:
                await self._copy(rank, digest, timeout_s)
                [answers[rank]] = await self._ask("Load", request, timeout_s, [rank])
        _raise_worst(answers)

    async def unload(self, digests: Iterable[str], others: bool = False) -> None:
        """Unload these adapters, or with `others` all except these. Raises AdapterCallError and
        ShardsLostError."""
        request = pb.UnloadRequest(digests=digests, others=others)
        _raise_worst(await self._ask("Unload", request, UNLOAD_TIMEOUT_S))

    async def check_alive(self, ranks: Iterable[int] | None = None) -> None:
        """Raise ShardsLostError unless these ranks, or all, answer at once. This detects a hanging rank
        earlier than its launcher does."""
        answers = await self._call("Info", pb.InfoRequest(), ALIVE_TIMEOUT_S, ranks)
        if any(isinstance(answer, BaseException) for answer in answers.values()):
            raise ShardsLostError(LOST)

    async def _ask(
        self, method: str, request: Message, timeout_s: float, ranks: Iterable[int] | None = None
    ) -> list[Any]:
        """Call these ranks, or all, and return every answer or exception when all calls have ended. Raises
        ShardsLostError if a rank did not answer in time and does not answer at all any more."""
        answers = await self._call(method, request, timeout_s, ranks)
        if late := [rank for rank, answer in answers.items() if _is_late(answer)]:
            await self.check_alive(late)
        return list(answers.values())

    async def _call(
        self, method: str, request: Message, timeout_s: float, ranks: Iterable[int] | None
    ) -> dict[int, Any]:
        stubs = self._stubs()
        called = range(len(stubs)) if ranks is None else list(ranks)
        calls = [_answer(getattr(stubs[rank], method)(request, timeout=timeout_s)) for rank in called]
        return dict(zip(called, await asyncio.gather(*calls, return_exceptions=True), strict=True))

    async def _copy(self, rank: int, digest: str, timeout_s: float) -> None:
        """Copy an artifact from the first rank to `rank`. Raises AdapterCallError and ShardsLostError."""
        stubs = self._stubs()
        try:
            with _shard_errors():
                await copy_artifact(stubs[0], stubs[rank], digest, timeout_s)
        except TimeoutError as error:
            await self.check_alive([0, rank])
            raise AdapterCallError(grpc.StatusCode.DEADLINE_EXCEEDED, "") from error
        except ConnectionError as error:
            raise ShardsLostError(LOST) from error

    def _stubs(self) -> list[Any]:
        """Return each rank's stub, on new channels if the old ones are stale. Calls in progress finish on the
        old channels. Raises ShardsLostError."""
        if not self._channels:
            raise ShardsLostError(LOST)
        if self._link.is_stale:
            old = self._channels
            self._channels = self._link.open_channels()
            for channel in old:
                closing = asyncio.create_task(channel.close(UNLOAD_TIMEOUT_S), name="close")
                self._closing.add(closing)
                closing.add_done_callback(self._closing.discard)
        return [ShardServiceStub(channel) for channel in self._channels]

    async def close(self) -> None:
        streams = self._streams
        channels = self._channels
        self._streams = []
        self._channels = []  # no call must begin on a channel that is being closed
        for stream in streams:
            stream.abort()
        for closing in self._closing:
            closing.cancel()
        await asyncio.gather(*(channel.close() for channel in channels))
        self._answers.clear()
        self._steps.clear()
        self._settle(None)

    async def _ask_infos(self) -> list[pb.InfoResponse] | None:
        """Return every rank's info, or None if a rank is missing or belongs to an earlier start of the
        group."""
        stubs = [ShardServiceStub(channel) for channel in self._channels]
        calls = [stub.Info(pb.InfoRequest(), timeout=INFO_TIMEOUT_S) for stub in stubs]
        infos: list[pb.InfoResponse] = []
        try:
            for call in calls:
                infos.append(await call)  # noqa: PERF401  # their number is the rank of a failed call
        except grpc.aio.AioRpcError as error:
            self._log_once(len(infos), error.details() or error.code().name)
            return None
        finally:
            for call in calls:
                call.cancel()
        return infos if self._is_group(infos) else None

    def _is_group(self, infos: list[pb.InfoResponse]) -> bool:
        """Return True if these are the ranks of one start of a group. Log a wrong rank."""
        for rank, info in enumerate(infos):
            if info.rank != rank:
                self._log_once(rank, f"rank {info.rank} answers there")
                return False
            if info.world_size != len(infos):
                self._log_once(rank, f"it belongs to {info.world_size} shards, but {len(infos)} are expected")
                return False
        return len({info.epoch for info in infos}) == 1

    async def _open_streams(self) -> bool:
        """Open the step streams. Return False if a rank is unreachable again."""
        self._responses = [deque() for _ in self._channels]
        try:
            for rank in range(len(self._channels)):
                self._streams.append(await self._link.open_stream(rank, partial(self._make_stream, rank)))
        except OSError as error:
            self._log_once(len(self._streams), str(error) or type(error).__name__)
            return False
        return True

    def _make_stream(self, rank: int) -> FramedChannel[pb.StepResponse]:
        take = partial(self._take, self._responses[rank])
        lose = partial(self._lose, rank)
        return FramedChannel("router and shard", bytes, pb.StepResponse.FromString, take, lose)

    def _take(self, responses: deque[pb.StepResponse], response: pb.StepResponse) -> None:
        responses.append(response)
        self._combine()

    def _log_once(self, rank: int, reason: str) -> None:
        """Log why a shard cannot be reached, each reason once until all shards are connected."""
        if (rank, reason) not in self._logged:
            self._logged.add((rank, reason))
            name = self._link.names[rank]
            logger.log(self._link.severity, "shard %d at %s cannot be reached: %s", rank, name, reason)

    def _lose(self, rank: int) -> None:
        self._put(ShardsLostError(f"shard {rank} is lost"))

    def _put(self, answer: StepAnswer | ShardsLostError) -> None:
        self._answers.append(answer)
        arrival = self._arrival
        if arrival is not None:
            self._arrival = None
            if not arrival.done():  # It is done if `receive` was cancelled.
                arrival.set_result(None)

    def _combine(self) -> None:
        """Queue the oldest step's answer once all ranks have answered. Answers that differ or cannot be
        decoded are a failure of the group."""
        while self._steps and all(self._responses):
            responses = [queue.popleft() for queue in self._responses]
            step = self._steps.popleft()
            self._settle(step)
            if len({(response.step_id, response.digest) for response in responses}) > 1:
                self._put(ShardsLostError(f"the ranks disagree on step {step.step_id}"))
                return
            try:
                self._put(decode_answer(step, responses[0]))
            except (KeyError, ValueError):
                self._put(ShardsLostError(f"the answer to step {step.step_id} cannot be decoded"))
                return

    def _settle(self, step: Step | None) -> None:
        """Wake callers of `settle` that wait for `step`, or all of them if it is None."""
        while self._settling and (step is None or self._settling[0][0] is step):
            _, settled = self._settling.popleft()
            if not settled.done():
                settled.set_result(None)


def _is_missing(answer: Any) -> bool:
    return isinstance(answer, AdapterCallError) and answer.code is grpc.StatusCode.NOT_FOUND


def _is_late(answer: Any) -> bool:
    return isinstance(answer, AdapterCallError) and answer.code is grpc.StatusCode.DEADLINE_EXCEEDED


def _raise_worst(answers: Iterable[Any]) -> None:
    errors = [answer for answer in answers if isinstance(answer, BaseException)]
    if errors:
        raise min(errors, key=lambda error: not isinstance(error, ShardsLostError))


async def _answer(call: Any) -> Any:
    try:
        with _shard_errors():
            return await call
    except asyncio.CancelledError:
        if not call.done() or (task := asyncio.current_task()) is None or task.cancelling():
            raise
        raise ShardsLostError(LOST) from None  # the link was closed during the call


@contextmanager
def _shard_errors() -> Iterator[None]:
    try:
        yield
    except grpc.aio.AioRpcError as error:
        if error.code() in LOST_CODES:
            raise ShardsLostError(LOST) from error
        raise AdapterCallError(error.code(), error.details() or "") from error
