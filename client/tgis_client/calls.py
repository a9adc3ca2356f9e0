"""Turns the methods of both clients into calls as values. It does no I/O."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypedDict, TypeVar

import grpc
from google.protobuf.message import Message

from tgis_client import messages
from tgis_client.arguments import (
    CallArguments,
    Metadata,
    Prompt,
    call_metadata,
    encode_prompts,
    generation_metadata,
)
from tgis_client.connection import DEFAULT_TARGET, BearerToken, Tls, read_target
from tgis_client.errors import DeadlineError, SettingsError, UnavailableError
from tgis_client.parameters import Parameters
from tgis_client.pb import client_pb2 as client_pb
from tgis_client.pb import generation_pb2 as pb
from tgis_client.results import NO_REPORT, Generation, ModelInfo, Tokenization, join
from tgis_client.retries import NO_RETRIES, Attempts, Failure, RetryPolicy
from tgis_client.service_config import ServiceConfig

R = TypeVar("R")
Pairs = Iterable[tuple[str, str | bytes]]

SERVICE = "fmaas.GenerationService"
HEALTH = "/grpc.health.v1.Health/Check"
SERVING = 1
HEALTH_TIMEOUT_S = 5.0
HEALTH_BACKOFF = RetryPolicy(initial_backoff_s=0.1, max_backoff_s=1.0)
NOT_HEALTHY = (UnavailableError, DeadlineError)
"""Errors of a health check that mean that the service is not there, or not yet."""
DEFAULT_PARAMETERS = Parameters()


class ClientSettings(TypedDict, total=False):
    """Keyword arguments of both clients."""

    tls: Tls | None
    """None: no TLS."""
    token: str | None
    """Bearer token of every call."""
    token_path: str | Path | None
    """File whose first line is the token; it is read again for each call."""
    timeout: float | None
    """Maximum duration in seconds of calls that have no timeout of their own."""
    retry: RetryPolicy | None
    """None: that of the service config, or RetryPolicy()."""
    service_config: str | None
    """gRPC's service config as JSON."""
    channel_options: Sequence[tuple[str, Any]]
    """Further options of gRPC's channel."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a client, with the defaults of ClientSettings."""

    target: str = DEFAULT_TARGET
    tls: Tls | None = None
    token: str | None = field(default=None, repr=False)
    token_path: str | Path | None = None
    timeout: float | None = None
    retry: RetryPolicy | None = None
    service_config: str | None = None
    channel_options: Sequence[tuple[str, Any]] = ()

    @property
    def address(self) -> str:
        """The target with its port. Raises SettingsError."""
        return read_target(self.target)

    @property
    def grpc_options(self) -> list[tuple[str, Any]]:
        """Options of the channel."""
        options: list[tuple[str, Any]] = [
            ("grpc.max_receive_message_length", -1),  # token details of long inputs exceed 4 MiB
            ("grpc.enable_retries", 0),  # otherwise attempts of gRPC and of this client would multiply
            # Finds lost peers during calls; gRPC's servers by default refuse pings within five minutes.
            ("grpc.keepalive_time_ms", 330_000),
            ("grpc.keepalive_timeout_ms", 20_000),
        ]
        if self.service_config is not None:
            options.append(("grpc.service_config", self.service_config))
        if self.tls is not None and self.tls.server_name is not None:
            options.append(("grpc.ssl_target_name_override", self.tls.server_name))
        return [*options, *self.channel_options]


@dataclass(frozen=True)
class Call(Generic[R]):
    """Call of a method: what is sent, and how its answer is read."""

    path: str
    message: Message
    response_type: type[Message]
    metadata: Metadata
    attempts: Attempts
    read: Callable[[Any, Pairs], R]
    """Reads a message, with the trailing metadata if it is the answer of a unary method."""


def serialize(message: Message) -> bytes:
    return message.SerializeToString()


class CallBuilder:
    """Builds the calls of a client."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._service_config = ServiceConfig(settings.service_config)
        self._token = BearerToken(settings.token, settings.token_path)
        self._token.metadata()  # raises now, not at the first call

    def generate(
        self, prompts: Sequence[Prompt], parameters: Parameters, arguments: CallArguments
    ) -> Call[list[Generation]]:
        texts, is_ids = encode_prompts(prompts)
        token_ids = arguments.get("token_ids", False)

        def read(message: pb.BatchedGenerationResponse, trailers: Pairs) -> list[Generation]:
            report = messages.read_report(trailers)
            return [messages.read_generation(each, token_ids, report) for each in message.responses]

        return self._call(
            f"/{SERVICE}/Generate",
            messages.batch_request(texts, parameters, arguments),
            pb.BatchedGenerationResponse,
            generation_metadata(parameters, arguments, is_ids),
            arguments,
            read,
        )

    def stream(self, prompt: Prompt, parameters: Parameters, arguments: CallArguments) -> Call[Generation]:
        [text], is_ids = encode_prompts([prompt])
        token_ids = arguments.get("token_ids", False)
        return self._call(
            f"/{SERVICE}/GenerateStream",
            messages.single_request(text, parameters, arguments),
            pb.GenerationResponse,
            generation_metadata(parameters, arguments, is_ids),
            arguments,
            lambda message, _: messages.read_generation(message, token_ids),
        )

    def tokenize(
        self,
        prompts: Sequence[Prompt],
        truncate_input_tokens: int,
        tokens: bool,
        offsets: bool,
        arguments: CallArguments,
    ) -> Call[list[Tokenization]]:
        texts, is_ids = encode_prompts(prompts)
        token_ids = arguments.get("token_ids", False)
        request = messages.tokenize_request(
            texts,
            arguments,
            return_tokens=tokens or token_ids,
            return_offsets=offsets,
            truncate_input_tokens=truncate_input_tokens,
        )
        return self._call(
            f"/{SERVICE}/Tokenize",
            request,
            pb.BatchedTokenizeResponse,
            call_metadata(arguments, is_ids),
            arguments,
            lambda message, _: [messages.read_tokenization(each, token_ids) for each in message.responses],
        )

    def model_info(self, arguments: CallArguments) -> Call[ModelInfo]:
        return self._call(
            f"/{SERVICE}/ModelInfo",
            pb.ModelInfoRequest(model_id=arguments.get("model_id", "")),
            pb.ModelInfoResponse,
            call_metadata(arguments),
            arguments,
            lambda message, _: messages.read_model_info(message),
        )

    def health(self, timeout: float | None) -> Call[bool]:
        return Call(
            HEALTH,
            client_pb.HealthCheckRequest(service=SERVICE),
            client_pb.HealthCheckResponse,
            (),
            Attempts(NO_RETRIES, timeout),
            lambda message, _: bool(message.status == SERVING),
        )

    def metadata(self, call: Call[Any]) -> Metadata:
        """Return the metadata of the call's next attempt. The token may have been renewed."""
        return (*self._token.metadata(), *call.metadata)

    def _call(
        self,
        path: str,
        message: Message,
        response_type: type[Message],
        metadata: Metadata,
        arguments: CallArguments,
        read: Callable[[Any, Pairs], R],
    ) -> Call[R]:
        configured = self._service_config.of_method(path)
        policy = self._settings.retry or configured.retry or RetryPolicy()
        default = self._settings.timeout if self._settings.timeout is not None else configured.timeout_s
        timeout = arguments.get("timeout", default)
        if timeout is not None and timeout < 0:
            raise SettingsError("the timeout must not be negative")
        return Call(path, message, response_type, metadata, Attempts(policy, timeout), read)


class StreamState:
    """Parts of a stream.

    Those before the first token are held back while another attempt is allowed, so that a call that fails
    before it can be sent again without showing a part twice."""

    def __init__(self, call: Call[Generation]) -> None:
        self._call = call
        self._parts: list[Generation] = []
        self._has_begun = False
        self._report = NO_REPORT

    def receive(self, message: Any) -> list[Generation]:
        """Take a message, and return the parts for the caller."""
        part = self._call.read(message, ())
        self._parts.append(part)
        if self._has_begun:
            return [part]
        is_wanted = part.generated_token_count > 0 or part.stop_reason != 0
        self._has_begun = is_wanted or self._call.attempts.is_last
        return list(self._parts) if self._has_begun else []

    def finish(self, trailers: Pairs) -> list[Generation]:
        """End the stream, and return the parts that are still held back."""
        self._report = messages.read_report(trailers)
        return [] if self._has_begun else list(self._parts)

    def delay_after(self, failure: Failure) -> float:
        """Forget what has arrived, and return the seconds until the next attempt.

        Raises CallError if there is none."""
        delay_s = self._call.attempts.delay_after(failure, self._has_begun)
        self._parts.clear()
        return delay_s

    @property
    def result(self) -> Generation:
        """Everything that has arrived, as one; at the end of the stream with the call's report."""
        return replace(join(self._parts), report=self._report)


class HealthPoll:
    """Times of the health checks that wait for a service."""

    def __init__(self, timeout: float | None) -> None:
        self._timeout = timeout
        self._ends = None if timeout is None else time.monotonic() + timeout
        self._num_checks = 0

    @property
    def check_timeout_s(self) -> float:
        """Timeout of the next check."""
        return (
            HEALTH_TIMEOUT_S if self._ends is None else min(HEALTH_TIMEOUT_S, self._remaining_s(self._ends))
        )

    def delay_s(self) -> float:
        """Return the seconds until the next check. Raises UnavailableError if no time is left."""
        self._num_checks += 1
        delay_s = HEALTH_BACKOFF.backoff_s(self._num_checks)
        if self._ends is not None and delay_s >= self._remaining_s(self._ends):
            text = f"the service did not become healthy within {self._timeout} s"
            raise UnavailableError(grpc.StatusCode.UNAVAILABLE, text, None, self._num_checks)
        return delay_s

    def _remaining_s(self, ends: float) -> float:
        return max(0.0, ends - time.monotonic())
