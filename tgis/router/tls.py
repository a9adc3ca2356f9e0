"""Encryption of the public port: what the three PEM files that TGIS knows ask for."""

import ssl
from pathlib import Path

import grpc

from tgis.router.errors import StartupError


def server_credentials(
    cert_path: str | None, key_path: str | None, client_ca_path: str | None
) -> grpc.ServerCredentials | None:
    """None for a port in the clear. With a client CA, clients must show a certificate it has signed.

    A certificate without a key, or the other way round, has been refused before. Raises StartupError, in
    TGIS's words."""
    if not cert_path or not key_path:
        return None
    pair = _read(key_path, "key"), _read(cert_path, "cert")
    client_ca = _read(client_ca_path, "client ca cert") if client_ca_path else None
    _check(cert_path, key_path, client_ca_path)
    return grpc.ssl_server_credentials([pair], client_ca, require_client_auth=client_ca is not None)


def _read(path: str, what: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise StartupError(f"couldn't load {what} from {path}") from error


def _check(cert_path: str, key_path: str, client_ca_path: str | None) -> None:
    """gRPC would only say that the port cannot be opened."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(cert_path, key_path, password=lambda: b"")  # nobody is there to be asked
        if client_ca_path:
            context.load_verify_locations(client_ca_path)
    except (ssl.SSLError, ValueError) as error:
        raise StartupError(f"tls configuration error: {error}") from error
