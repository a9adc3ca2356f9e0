"""Authenticates calls, if a file of tokens is given: a call without one of the tokens is refused before
anything of it is read. Health checks need no token."""

import hashlib
import hmac
import logging
import time
from collections.abc import Awaitable, Callable
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import grpc

from tgis.config.network import PortOptions
from tgis.net.tls import file_version
from tgis.router.api.grpc.call_status import Context, Status, end_call
from tgis.router.errors import StartupError
from tgis.router.metrics.metric_types import Counter

logger = logging.getLogger(__name__)

HEALTH_PREFIX = "/grpc.health.v1.Health/"
SCHEME = "bearer "
REFUSAL = "a valid bearer token is required"
MAX_METHOD_CHARS = 100  # length in the log, because an unknown client may call any name
CHECK_INTERVAL_S = 1.0  # least time between two checks of the file

Handler = Any  # grpc types its handlers for the synchronous server only


def warn_if_unprotected(options: PortOptions, host: str) -> None:
    """Warn if anybody who reaches `host`, the address of the gRPC port, may call."""
    if ip_address(host).is_loopback or options.tls_client_ca_cert_path or options.auth_tokens_path:
        return
    if options.tls_cert_path:
        logger.warning(
            "anybody who reaches %s may call the gRPC port; to admit only known clients, set "
            "--tls-client-ca-cert-path or --auth-tokens-path",
            host,
        )
    else:
        logger.warning(
            "anybody who reaches %s may call the gRPC port, which is not encrypted; to encrypt it, set "
            "--tls-cert-path and --tls-key-path; to admit only known clients, also set "
            "--tls-client-ca-cert-path or --auth-tokens-path; to serve only this machine, set "
            "--bind 127.0.0.1",
            host,
        )


class BearerTokens:
    """Bearer tokens of a file, one per line. A changed file is read again, so that tokens can be replaced."""

    def __init__(self, path: str) -> None:
        """Read the file. Raises StartupError."""
        self._path, self._state, self._checked_at = path, file_version(path), time.monotonic()
        self._digests = _read(path)

    def has(self, token: str) -> bool:
        """Return whether `token` is known, in a time that does not depend on how much of it is right."""
        self._reload_if_changed()
        digest = _digest(token)
        return sum(hmac.compare_digest(digest, known) for known in self._digests) > 0

    def _reload_if_changed(self) -> None:
        now = time.monotonic()
        if now - self._checked_at < CHECK_INTERVAL_S:
            return
        self._checked_at, state = now, file_version(self._path)
        if state != self._state:
            self._state = state
            try:
                self._digests = _read(self._path)
            except StartupError as error:
                logger.error("the bearer tokens were not reloaded, those read before stay valid: %s", error)


class AuthInterceptor(grpc.aio.ServerInterceptor):
    def __init__(self, tokens: BearerTokens, failures: Counter) -> None:
        self._tokens, self._failures = tokens, failures

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        if handler_call_details.method.startswith(HEALTH_PREFIX) or self._is_authenticated(
            handler_call_details
        ):
            return await continuation(handler_call_details)
        self._failures.add("unauthenticated")
        method = handler_call_details.method[:MAX_METHOD_CHARS]
        logger.warning("a call of %s was refused: %s", method, REFUSAL)
        return grpc.unary_unary_rpc_method_handler(_refuse)

    def _is_authenticated(self, details: grpc.HandlerCallDetails) -> bool:
        given = [value for key, value in details.invocation_metadata or () if key == "authorization"]
        if len(given) != 1 or not isinstance(given[0], str):
            return False
        scheme, token = given[0][: len(SCHEME)], given[0][len(SCHEME) :]
        return scheme.lower() == SCHEME and self._tokens.has(token.strip())


async def _refuse(request: Any, context: Context) -> None:
    await end_call(context, Status(grpc.StatusCode.UNAUTHENTICATED, REFUSAL))


def _read(path: str) -> list[bytes]:
    try:
        lines = Path(path).read_text().split()
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"the file of bearer tokens {path} cannot be read") from error
    if not lines:
        raise StartupError(f"the file of bearer tokens {path} has no token")
    return [_digest(line) for line in lines]


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="replace")).digest()
