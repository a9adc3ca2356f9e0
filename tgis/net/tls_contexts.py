"""Contexts of Python's own TLS, made of PEM texts in memory: TLS 1.2 with ECDHE and AES-GCM, or TLS 1.3."""

import os
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

CIPHERS = "ECDHE+AESGCM"  # of TLS 1.2; all of TLS 1.3's are of the kind


@dataclass(frozen=True, eq=False)
class Pem:
    """What shows who this end is, and whom it believes."""

    cert: bytes
    key: bytes
    ca: bytes | None
    """Authorities of the other end."""


def open_server(pem: Pem) -> ssl.SSLContext:
    """Of a port for everybody: clients are not asked who they are. This and the next two raise SSLError."""
    return _context(pem, ssl.PROTOCOL_TLS_SERVER)


def mutual_server(pem: Pem) -> ssl.SSLContext:
    """Of a port for clients whom the authorities vouch for."""
    context = _context(pem, ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = ssl.CERT_REQUIRED
    _trust(context, pem)
    return context


def mutual_client(pem: Pem) -> ssl.SSLContext:
    """Of calls to a server whose name the authorities vouch for, showing who calls."""
    context = _context(pem, ssl.PROTOCOL_TLS_CLIENT)
    _trust(context, pem)
    return context


def _context(pem: Pem, protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(CIPHERS)
    # Every connection shows its certificate, as one resumed by a ticket would not.
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
    """The path of a file, which contexts insist on; what is on the disk may have changed meanwhile."""
    file = os.memfd_create("pem")
    try:
        os.write(file, content)
        yield f"/proc/self/fd/{file}"
    finally:
        os.close(file)
