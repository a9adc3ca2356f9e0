"""Client of `fmaas.GenerationService`, the gRPC API of TGIS-next, TGIS and vllm-tgis-adapter."""

from tgis_client.arguments import CallArguments, Prompt
from tgis_client.async_client import AsyncClient, AsyncStream
from tgis_client.client import Client, Stream
from tgis_client.connection import Tls
from tgis_client.errors import (
    CallError,
    ClientError,
    DeadlineError,
    InvalidRequestError,
    OverloadedError,
    SettingsError,
    TooLargeError,
    UnauthenticatedError,
    UnavailableError,
)
from tgis_client.parameters import LengthPenalty, Parameters
from tgis_client.results import (
    CallReport,
    Generation,
    ModelInfo,
    ModelKind,
    Offset,
    StopReason,
    Token,
    Tokenization,
    TopToken,
)
from tgis_client.retries import NO_RETRIES, RetryPolicy

__all__ = [
    "NO_RETRIES",
    "AsyncClient",
    "AsyncStream",
    "CallArguments",
    "CallError",
    "CallReport",
    "Client",
    "ClientError",
    "DeadlineError",
    "Generation",
    "InvalidRequestError",
    "LengthPenalty",
    "ModelInfo",
    "ModelKind",
    "Offset",
    "OverloadedError",
    "Parameters",
    "Prompt",
    "RetryPolicy",
    "SettingsError",
    "StopReason",
    "Stream",
    "Tls",
    "Token",
    "Tokenization",
    "TooLargeError",
    "TopToken",
    "UnauthenticatedError",
    "UnavailableError",
]
