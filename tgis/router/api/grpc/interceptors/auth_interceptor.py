"""Authenticates calls if the operator sets a file of tokens. A call without a valid token is refused before
its message is read. A token may name the call's tenant. Health checks need no token."""

import logging
from collections.abc import Awaitable, Callable
from ipaddress import ip_address
from typing import Any

import grpc

from tgis.config.network import PortOptions
from tgis.log_limits import KIND
from tgis.router.api.bearer_tokens import REFUSAL, BearerTokens
from tgis.router.api.grpc.call_status import Context, Status, end_call
from tgis.router.api.tenants import TokenHolder, token_holder
from tgis.router.metrics.metric_types import Counter

logger = logging.getLogger(__name__)

HEALTH_PREFIX = "/grpc.health.v1.Health/"
MAX_METHOD_CHARS = 100  # maximum length in the log, because an unknown client may call any name

Handler = Any  # grpc types its handlers for the synchronous server only


def warn_if_unprotected(options: PortOptions, host: str) -> None:
    """Warn if every client that reaches `host`, the address of the ports, may call."""
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
    if options.http_api:
        logger.warning("the HTTP API on %s is also unauthenticated", host)


class AuthInterceptor(grpc.aio.ServerInterceptor):
    def __init__(self, tokens: BearerTokens, failures: Counter) -> None:
        self._tokens = tokens
        self._failures = failures

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        if handler_call_details.method.startswith(HEALTH_PREFIX):
            return await continuation(handler_call_details)
        holder = self._authenticate(handler_call_details)
        if holder is not None:
            token_holder.set(holder)
            return await continuation(handler_call_details)
        self._failures.add("unauthenticated")
        method = handler_call_details.method[:MAX_METHOD_CHARS]
        logger.warning("a call of %s was refused: %s", method, REFUSAL, extra={KIND: "gRPC unauthenticated"})
        return grpc.unary_unary_rpc_method_handler(_refuse)

    def _authenticate(self, details: grpc.HandlerCallDetails) -> TokenHolder | None:
        """Return the holder of the call's token, or None to refuse the call."""
        given = [value for key, value in details.invocation_metadata or () if key == "authorization"]
        if len(given) != 1 or not isinstance(given[0], str):
            return None
        return self._tokens.holder_of_header(given[0])


async def _refuse(request: Any, context: Context) -> None:
    await end_call(context, Status(grpc.StatusCode.UNAUTHENTICATED, REFUSAL))
