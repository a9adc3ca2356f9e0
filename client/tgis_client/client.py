"""Client for synchronous programs."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import grpc

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
from tgis_client.errors import ClientError, call_error
from tgis_client.parameters import Parameters
from tgis_client.results import Generation, ModelInfo, Tokenization
from tgis_client.retries import read_failure

R = TypeVar("R")


class Connections:
    """Sends calls over the client's channel."""

    def __init__(self, settings: Settings, calls: CallBuilder) -> None:
        self._calls = calls
        address = settings.address

        def open_channel(credentials: grpc.ChannelCredentials | None) -> grpc.Channel:
            if credentials is None:
                return grpc.insecure_channel(address, settings.grpc_options)
            return grpc.secure_channel(address, credentials, settings.grpc_options)

        self._channels = ChannelCache(open_channel, settings.tls)

    @contextmanager
    def _channel(self) -> Iterator[grpc.Channel]:
        used = self._channels.acquire()
        try:
            yield used.channel
        except ValueError as error:
            # gRPC's error for a call on a closed channel: another thread has just closed the client.
            if isinstance(error, ClientError) or not self._channels.is_closed:
                raise
            raise call_error(grpc.StatusCode.CANCELLED, "the client was closed", None, 1) from None
        finally:
            for channel in self._channels.release(used):
                channel.close()

    def send(self, call: Call[R]) -> R:
        """Return the answer of a unary method. Raises CallError."""
        while True:
            try:
                with self._channel() as channel:
                    method = channel.unary_unary(call.path, serialize, call.response_type.FromString)
                    answer, rpc = method.with_call(
                        call.message, timeout=call.attempts.begin(), metadata=self._calls.metadata(call)
                    )
                    return call.read(answer, rpc.trailing_metadata() or ())
            except grpc.RpcError as error:
                delay_s = call.attempts.delay_after(read_failure(error))
            time.sleep(delay_s)

    def receive(self, call: Call[Generation], state: StreamState) -> Iterator[Generation]:
        """Yield the parts of a stream. Raises CallError."""
        while True:
            with self._channel() as channel:
                method = channel.unary_stream(call.path, serialize, call.response_type.FromString)
                rpc: Any = method(
                    call.message, timeout=call.attempts.begin(), metadata=self._calls.metadata(call)
                )
                try:
                    for message in rpc:
                        yield from state.receive(message)
                    yield from state.finish(rpc.trailing_metadata() or ())
                    return
                except grpc.RpcError:
                    delay_s = state.delay_after(read_failure(rpc))
                finally:
                    rpc.cancel()
            time.sleep(delay_s)

    def close(self) -> None:
        for channel in self._channels.close():
            channel.close()


class Stream(Iterator[Generation]):
    """Parts of a text as they are generated. The call begins when the first part is asked for.

    Leaving its `with` block, or `close`, cancels the call."""

    def __init__(self, connections: Connections, call: Call[Generation]) -> None:
        self._state = StreamState(call)
        self._parts = connections.receive(call, self._state)

    def __next__(self) -> Generation:
        return next(self._parts)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._parts.close()  # type: ignore[attr-defined]

    @property
    def result(self) -> Generation:
        """Everything that has arrived, as one; at the end with the report of the call."""
        return self._state.result


class Client:
    """Client of one service. It may be used by several threads at once."""

    def __init__(self, target: str = DEFAULT_TARGET, **settings: Unpack[ClientSettings]) -> None:
        """Create a client, which connects at the first call. Raises SettingsError."""
        given = Settings(target=target, **settings)
        self._calls = CallBuilder(given)
        self._connections = Connections(given, self._calls)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection. Calls in progress end with CANCELLED."""
        self._connections.close()

    def generate(
        self,
        prompt: Prompt,
        parameters: Parameters = DEFAULT_PARAMETERS,
        **arguments: Unpack[CallArguments],
    ) -> Generation:
        [generation] = self.generate_batch([prompt], parameters, **arguments)
        return generation

    def generate_batch(
        self,
        prompts: Sequence[Prompt],
        parameters: Parameters = DEFAULT_PARAMETERS,
        **arguments: Unpack[CallArguments],
    ) -> list[Generation]:
        """Return a text for each prompt, in order, all from one call."""
        return self._connections.send(self._calls.generate(prompts, parameters, arguments))

    def stream(
        self,
        prompt: Prompt,
        parameters: Parameters = DEFAULT_PARAMETERS,
        **arguments: Unpack[CallArguments],
    ) -> Stream:
        return Stream(self._connections, self._calls.stream(prompt, parameters, arguments))

    def tokenize(
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
        return self._connections.send(call)

    def model_info(self, **arguments: Unpack[CallArguments]) -> ModelInfo:
        return self._connections.send(self._calls.model_info(arguments))

    def is_healthy(self, timeout: float = HEALTH_TIMEOUT_S) -> bool:
        """Return True if the service is there and says that it serves."""
        try:
            return self._connections.send(self._calls.health(timeout))
        except NOT_HEALTHY:
            return False

    def wait_until_healthy(self, timeout: float | None = None) -> None:
        """Wait until the service serves. Raises UnavailableError after `timeout` seconds."""
        poll = HealthPoll(timeout)
        while not self.is_healthy(poll.check_timeout_s):
            time.sleep(poll.delay_s())
