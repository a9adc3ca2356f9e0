"""Client for asyncio."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import grpc
import grpc.aio

from tgis_client.arguments import CallArguments, Prompt
from tgis_client.calls import (
    DEFAULT_PARAMETERS,
    HEALTH_TIMEOUT_S,
    NOT_HEALTHY,
    Call,
    CallBuilder,
    ClientSettings,
    HealthPoll,
    Settings,
    StreamState,
    serialize,
)
from tgis_client.connection import DEFAULT_TARGET, ChannelCache
from tgis_client.errors import call_error
from tgis_client.parameters import Parameters
from tgis_client.results import Generation, ModelInfo, Tokenization
from tgis_client.retries import read_failure

R = TypeVar("R")


class AsyncConnections:
    """Sends calls over the client's channel."""

    def __init__(self, settings: Settings, calls: CallBuilder) -> None:
        self._calls = calls
        address = settings.address

        def open_channel(credentials: grpc.ChannelCredentials | None) -> grpc.aio.Channel:
            if credentials is None:
                return grpc.aio.insecure_channel(address, settings.grpc_options)
            return grpc.aio.secure_channel(address, credentials, settings.grpc_options)

        self._channels = ChannelCache(open_channel, settings.tls)

    @asynccontextmanager
    async def _channel(self) -> AsyncIterator[grpc.aio.Channel]:
        used = self._channels.acquire()
        try:
            yield used.channel
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._channels.is_closed and task is not None and not task.cancelling():
                raise call_error(grpc.StatusCode.CANCELLED, "the client was closed", None, 1) from None
            raise
        finally:
            for channel in self._channels.release(used):
                await channel.close()

    async def send(self, call: Call[R]) -> R:
        """Return the answer of a unary method. Raises CallError."""
        while True:
            try:
                async with self._channel() as channel:
                    method: Any = channel.unary_unary(call.path, serialize, call.response_type.FromString)
                    rpc = method(
                        call.message, timeout=call.attempts.begin(), metadata=self._calls.metadata(call)
                    )
                    answer = await rpc
                    return call.read(answer, await rpc.trailing_metadata() or ())
            except grpc.aio.AioRpcError as error:
                delay_s = call.attempts.delay_after(read_failure(error))
            await asyncio.sleep(delay_s)

    async def receive(self, call: Call[Generation], state: StreamState) -> AsyncIterator[Generation]:
        """Yield the parts of a stream. Raises CallError."""
        while True:
            async with self._channel() as channel:
                method: Any = channel.unary_stream(call.path, serialize, call.response_type.FromString)
                rpc = method(call.message, timeout=call.attempts.begin(), metadata=self._calls.metadata(call))
                try:
                    async for message in rpc:
                        for part in state.receive(message):
                            yield part
                    for part in state.finish(await rpc.trailing_metadata() or ()):
                        yield part
                    return
                except grpc.aio.AioRpcError as error:
                    delay_s = state.delay_after(read_failure(error))
                finally:
                    rpc.cancel()
            await asyncio.sleep(delay_s)

    async def close(self) -> None:
        for channel in self._channels.close():
            await channel.close()


class AsyncStream(AsyncIterator[Generation]):
    """Parts of a text as they are generated. The call begins when the first part is asked for.

    Leaving its `async with` block, or `aclose`, cancels the call."""

    def __init__(self, connections: AsyncConnections, call: Call[Generation]) -> None:
        self._state = StreamState(call)
        self._parts = connections.receive(call, self._state)

    async def __anext__(self) -> Generation:
        return await anext(self._parts)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self._parts.aclose()  # type: ignore[attr-defined]

    @property
    def result(self) -> Generation:
        """Everything that has arrived, as one; at the end with the report of the call."""
        return self._state.result


class AsyncClient:
    """Client of one service, for one event loop."""

    def __init__(self, target: str = DEFAULT_TARGET, **settings: Unpack[ClientSettings]) -> None:
        """Create a client, which connects at the first call. Raises SettingsError."""
        given = Settings(target=target, **settings)
        self._calls = CallBuilder(given)
        self._connections = AsyncConnections(given, self._calls)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connection. Calls in progress end with CANCELLED."""
        await self._connections.close()

    async def generate(
        self,
        prompt: Prompt,
        parameters: Parameters = DEFAULT_PARAMETERS,
        **arguments: Unpack[CallArguments],
    ) -> Generation:
        [generation] = await self.generate_batch([prompt], parameters, **arguments)
        return generation

    async def generate_batch(
        self,
        prompts: Sequence[Prompt],
        parameters: Parameters = DEFAULT_PARAMETERS,
        **arguments: Unpack[CallArguments],
    ) -> list[Generation]:
        """Return a text for each prompt, in order, all from one call."""
        return await self._connections.send(self._calls.generate(prompts, parameters, arguments))

    def stream(
        self,
        prompt: Prompt,
        parameters: Parameters = DEFAULT_PARAMETERS,
        **arguments: Unpack[CallArguments],
    ) -> AsyncStream:
        return AsyncStream(self._connections, self._calls.stream(prompt, parameters, arguments))

    async def tokenize(
        self,
        prompts: Sequence[Prompt],
        *,
        truncate_input_tokens: int = 0,
        tokens: bool = True,
        offsets: bool = False,
        **arguments: Unpack[CallArguments],
    ) -> list[Tokenization]:
        """Return the token count of each prompt, with its tokens and their offsets if they are wanted."""
        call = self._calls.tokenize(prompts, truncate_input_tokens, tokens, offsets, arguments)
        return await self._connections.send(call)

    async def model_info(self, **arguments: Unpack[CallArguments]) -> ModelInfo:
        return await self._connections.send(self._calls.model_info(arguments))

    async def is_healthy(self, timeout: float = HEALTH_TIMEOUT_S) -> bool:
        """Return True if the service is there and says that it serves."""
        try:
            return await self._connections.send(self._calls.health(timeout))
        except NOT_HEALTHY:
            return False

    async def wait_until_healthy(self, timeout: float | None = None) -> None:
        """Wait until the service serves. Raises UnavailableError after `timeout` seconds."""
        poll = HealthPoll(timeout)
        while True:
            if await self.is_healthy(poll.check_timeout_s):
                return
            await asyncio.sleep(poll.delay_s())
