"""Determines the tenant of a call and its rules. The tenant is the name that a trusted gateway sends, else
the name of the call's token, else the name in its client's certificate. The token of an operator has no
name."""

import hashlib
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import grpc

from tgis.router.engine.handle import TenantLimits

MAX_NAME_CHARS = 128


class TokenHolder(NamedTuple):
    """Whom the operator gave a bearer token."""

    tenant: str = ""
    """Name of the tenant; empty if it has none."""
    is_operator: bool = False


token_holder: ContextVar[TokenHolder] = ContextVar("token_holder", default=TokenHolder())  # noqa: B039
"""Holder of the current call's token. Each call runs in its own context."""


@dataclass(frozen=True)
class TenantRules:
    """Rules for the calls of one tenant."""

    priority_floor: int = 0
    requests_per_minute: int | None = None
    """None: no limit."""
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None

    def limits(self, tenant: str) -> TenantLimits:
        return TenantLimits(
            tenant, self.requests_per_minute, self.tokens_per_minute, self.concurrent_requests
        )


def is_name(text: str) -> bool:
    """Return True if a name can be shown unchanged: printable ASCII without spaces, and not too long."""
    return 0 < len(text) <= MAX_NAME_CHARS and text.isascii() and text.isprintable() and " " not in text


def tenant_of(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    """Return the tenant of the current call, or an empty text if it has none."""
    return token_holder.get().tenant or _certificate_name(context)


def is_operator() -> bool:
    """Return True if the current call has an operator's token."""
    return token_holder.get().is_operator


def _certificate_name(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    """Return the certificate's first alternative name, or its common name if it has no alternative name."""
    first, *_ = context.peer_identities() or (b"",)
    return shown_name(first)


def gateway_name(values: Iterable[str | bytes]) -> str:
    """Return the name in the values of a trusted key, or an empty text if there are none. Several values are
    one name, so that a client cannot add a name to the gateway's."""
    texts = (value if isinstance(value, bytes) else value.encode("latin-1", "replace") for value in values)
    return shown_name(b",".join(texts))


def shown_name(name: bytes) -> str:
    """Return a certificate's name. A name that cannot be shown is replaced by its digest, which keeps
    different names different."""
    text = name.decode("latin-1")
    return text if not text or is_name(text) else hashlib.sha256(name).hexdigest()
