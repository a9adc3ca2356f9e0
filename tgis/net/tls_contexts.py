"""Contexts of Python's TLS from PEM texts in memory: TLS 1.2 with ECDHE and AES-GCM, or TLS 1.3."""

import os
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

CIPHERS = "ECDHE+AESGCM"  # for TLS 1.2; all ciphers of TLS 1.3 are of this kind


@dataclass(frozen=True, eq=False)
class Pem:
    """PEM texts of this end's certificate and key, and of the authorities that it trusts."""

    cert: bytes
    key: bytes
    ca: bytes | None
    """Authorities that may have signed the other end's certificate."""


def open_server(pem: Pem) -> ssl.SSLContext:
    """Return the context of a port that asks clients for no certificate. Raises SSLError."""
    return _context(pem, ssl.PROTOCOL_TLS_SERVER)


def mutual_server(pem: Pem) -> ssl.SSLContext:
    """Return the context of a port for clients whose certificate the authorities signed. Raises SSLError."""
    context = _context(pem, ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = ssl.CERT_REQUIRED
    _trust(context, pem)
    return context


def mutual_client(pem: Pem) -> ssl.SSLContext:
    """Return the context of a client that shows its certificate and checks the server's name.

    The authorities must have signed the server's certificate. Raises SSLError."""
    context = _context(pem, ssl.PROTOCOL_TLS_CLIENT)
    _trust(context, pem)
    return context


def _context(pem: Pem, protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(CIPHERS)
    # Every connection must show its certificate, which one resumed by a session ticket would not.
    context.options |= ssl.OP_NO_TICKET | ssl.OP_NO_RENEGOTIATION
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0
    _show(context, pem)
    return context


def _show(context: ssl.SSLContext, pem: Pem) -> None:
    with _in_memory(pem.cert + b"\n" + pem.key) as path:
        context.load_cert_chain(path)


def _trust(context: ssl.SSLContext, pem: Pem) -> None:
    assert pem.ca is not None, "who checks the other end has somebody to believe"
    with _in_memory(pem.ca) as path:
        context.load_verify_locations(path)


@contextmanager
def _in_memory(content: bytes) -> Iterator[str]:
    """Yield the path of an in-memory file with this content.

    SSL contexts read only from paths, and the files on disk may have changed since they were checked."""
    file = os.memfd_create("pem")
    try:
        os.write(file, content)
        yield f"/proc/self/fd/{file}"
    finally:
        os.close(file)
