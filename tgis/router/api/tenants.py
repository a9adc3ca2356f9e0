"""Tenants of a call: the name that its token has, else the name in its client's certificate."""

import hashlib
from contextvars import ContextVar
from typing import Any

import grpc

MAX_NAME_CHARS = 128

token_tenant: ContextVar[str] = ContextVar("token_tenant", default="")
"""Name that the token of the current call has. Each call runs in a context of its own."""


def is_name(text: str) -> bool:
    """Return whether a name can be shown as it is: printable ASCII without spaces, and not too long."""
    return 0 < len(text) <= MAX_NAME_CHARS and text.isascii() and text.isprintable() and " " not in text


def tenant_of(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    """Return the tenant of the current call, or an empty text if nothing names one."""
    return token_tenant.get() or _certificate_name(context)


def _certificate_name(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    """Return the certificate's first alternative name, else its common name."""
    first, *_ = context.peer_identities() or (b"",)
    return shown_name(first)


def shown_name(name: bytes) -> str:
    """Return a certificate's name. One that cannot be shown is replaced by its digest, so that different
    names stay different."""
    text = name.decode("latin-1")
    return text if not text or is_name(text) else hashlib.sha256(name).hexdigest()
