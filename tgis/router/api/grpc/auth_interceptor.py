"""Authenticates calls, if a file of tokens is given: a call without one of the tokens is refused before
anything of it is read, and a token may name the call's tenant. Health checks need no token."""

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
from tgis.router.api.grpc.tenants import MAX_NAME_CHARS, is_name, token_tenant
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
    """Bearer tokens of a file. Each line is empty, a token or `tenant NAME TOKEN`. A changed file is read
    again, so that tokens can be replaced."""

    def __init__(self, path: str) -> None:
        """Read the file. Raises StartupError."""
        self._path, self._state, self._checked_at = path, file_version(path), time.monotonic()
        self._tenants = _read(path)

    def tenant_of(self, token: str) -> str | None:
        """Return the name of the tenant whose `token` it is, empty if it has none, or None if the token is
        unknown. The time does not depend on how much of the token is right."""
        self._reload_if_changed()
        digest = _digest(token)
        found = [tenant for known, tenant in self._tenants.items() if hmac.compare_digest(digest, known)]
        return found[0] if found else None

    def _reload_if_changed(self) -> None:
        now = time.monotonic()
        if now - self._checked_at < CHECK_INTERVAL_S:
            return
        self._checked_at, state = now, file_version(self._path)
        if state != self._state:
            self._state = state
            try:
                self._tenants = _read(self._path)
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
        if handler_call_details.method.startswith(HEALTH_PREFIX):
            return await continuation(handler_call_details)
        tenant = self._authenticate(handler_call_details)
        if tenant is not None:
            token_tenant.set(tenant)
            return await continuation(handler_call_details)
        self._failures.add("unauthenticated")
        method = handler_call_details.method[:MAX_METHOD_CHARS]
        logger.warning("a call of %s was refused: %s", method, REFUSAL)
        return grpc.unary_unary_rpc_method_handler(_refuse)

    def _authenticate(self, details: grpc.HandlerCallDetails) -> str | None:
        """Return the name of the call's tenant, empty if it has none, or None if it may not be served."""
        given = [value for key, value in details.invocation_metadata or () if key == "authorization"]
        if len(given) != 1 or not isinstance(given[0], str):
            return None
        scheme, token = given[0][: len(SCHEME)], given[0][len(SCHEME) :]
        return self._tokens.tenant_of(token.strip()) if scheme.lower() == SCHEME else None


async def _refuse(request: Any, context: Context) -> None:
    await end_call(context, Status(grpc.StatusCode.UNAUTHENTICATED, REFUSAL))


def _read(path: str) -> dict[bytes, str]:
    """Return the tenants' names by digest of the token. No error's text contains a line's content."""
    try:
        lines = Path(path).read_text().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"the file of bearer tokens {path} cannot be read") from error
    tenants: dict[bytes, str] = {}
    for number, words in enumerate(map(str.split, lines), 1):
        match words:
            case []:
                continue
            case [token]:
                name = ""
            case ["tenant", name, token] if is_name(name):
                pass
            case _:
                raise StartupError(
                    f"line {number} of the file of bearer tokens {path} must be TOKEN or `tenant NAME TOKEN` "
                    f"with a name of at most {MAX_NAME_CHARS} characters of printable ASCII"
                )
        if tenants.setdefault(_digest(token), name) != name:
            raise StartupError(
                f"line {number} of the file of bearer tokens {path} has a token that another line gives to "
                "another tenant"
            )
    if not tenants:
        raise StartupError(f"the file of bearer tokens {path} has no token")
    return tenants


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="replace")).digest()
