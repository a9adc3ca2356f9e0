"""Certificates from PEM files, for gRPC and for Python's TLS: TLS 1.2 with ECDHE and AES-GCM, or TLS 1.3.

New connections use changed files, unless they are half-written or do not fit together."""

import asyncio
import logging
import os
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import grpc
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.types import CertificatePublicKeyTypes, PublicKeyTypes
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

from tgis.config.network import LinkOptions, PortOptions
from tgis.errors import OperatorError

logger = logging.getLogger(__name__)

REFRESH_S = 5.0  # between two checks of the files; each new connection checks them too
EXPIRES_SOON_S = 7 * 86400.0
WARN_EVERY_S, EXPIRED_EVERY_S = 86400.0, 60.0
CIPHERS = "ECDHE+AESGCM"  # for TLS 1.2; all ciphers of TLS 1.3 are of this kind


@dataclass(frozen=True)
class TlsFiles:
    """Paths of the PEM files. A certificate without a key, or a key without one, has been refused before."""

    cert: str
    key: str
    ca: str | None
    """Authority that must have signed the other end's certificate; None: the other end needs none."""


@dataclass(frozen=True, eq=False)
class Pem:
    """PEM texts of this end's certificate and key, and of the authorities that it trusts."""

    cert: bytes
    key: bytes
    ca: bytes | None


@dataclass(frozen=True, eq=False)
class _Content:
    """Content of files that fit together."""

    pem: Pem
    context: ssl.SSLContext | None
    expires_at: float
    """Unix time in seconds."""

    @property
    def configuration(self) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([(self.pem.key, self.pem.cert)], self.pem.ca)


class CertificateError(OperatorError):
    """Error for certificate files that are missing or invalid."""


class Certificates:
    """Certificates as they were when the files were last valid."""

    def __init__(
        self,
        files: TlsFiles,
        make_context: Callable[[Pem], ssl.SSLContext] | None = None,
        name: str = "TLS",
    ) -> None:
        """Read the files. Without `make_context` there is no `context`. Raises CertificateError."""
        self._files, self._make_context, self._name = files, make_context, name
        self._lock = threading.Lock()
        self._versions = self._file_versions()
        self._content = self._used_by_grpc = self._read()
        self._warned_at = -WARN_EVERY_S
        self.num_refusals = 0
        """Number of changes of the files that were not used."""
        self._warn_if_expiring()

    @property
    def seconds_left(self) -> float:
        return self._content.expires_at - time.time()

    @property
    def pem(self) -> Pem:
        """PEM texts in use. They are a new object after each change that is used."""
        return self._content.pem

    @property
    def context(self) -> ssl.SSLContext:
        assert self._content.context is not None, "certificates without make_context have no context"
        return self._content.context

    def renewing_context(self) -> ssl.SSLContext:
        """Return a server's context; every handshake uses the certificates that the files hold by then."""

        def renew(connection: ssl.SSLObject, name: str, context: ssl.SSLContext) -> None:
            self.refresh()
            connection.context = self.context

        context = self.context
        context.sni_callback = renew  # called in every handshake, even if the client sends no name
        return context

    def client_port_context(self) -> ssl.SSLContext:
        """Return a context as `renewing_context` does, of a port that asks clients for a certificate if there
        is an authority. Raises CertificateError."""
        make, known = mutual_server_context if self._files.ca else server_context, self.pem
        try:
            context = latest = make(known)
        except OSError as error:
            raise CertificateError(f"{self._prefix}: the files cannot be used: {error}") from error

        def renew(connection: ssl.SSLObject, name: str, context: ssl.SSLContext) -> None:
            nonlocal known, latest
            self.refresh()
            if known is not self.pem:
                known = self.pem
                try:
                    latest = make(known)
                except OSError as error:
                    logger.error("the changed %s files are not used for HTTP: %s", self._name, error)
            connection.context = latest

        context.sni_callback = renew
        return context

    def credentials(self) -> grpc.ServerCredentials:
        return grpc.dynamic_ssl_server_credentials(
            self._content.configuration,
            self._changed_configuration,  # type: ignore[arg-type]  # the stubs lack None: no change
            require_client_authentication=self._files.ca is not None,
        )

    async def watch(self) -> NoReturn:
        """Check the files regularly, so that an error in them is logged before a client is refused for it."""
        while True:
            await asyncio.sleep(REFRESH_S)
            await asyncio.to_thread(self.refresh)

    def refresh(self) -> None:
        """Read changed files and use them if valid. Log a certificate that expires soon or has expired."""
        with self._lock:
            versions = self._file_versions()
            if versions != self._versions:
                self._versions = versions
                self._read_again()
            self._warn_if_expiring()

    def _warn_if_expiring(self) -> None:
        left_s = self.seconds_left
        pause_s = WARN_EVERY_S if left_s > 0 else EXPIRED_EVERY_S
        if left_s >= EXPIRES_SOON_S or time.monotonic() - self._warned_at < pause_s:
            return
        self._warned_at = time.monotonic()
        if left_s > 0:
            days = left_s / 86400
            logger.warning("the %s certificate expires in %.1f days", self._name, days)
            return
        expired_at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._content.expires_at))
        logger.error(
            "the %s certificate %s expired at %s: the other end refuses it; renew it",
            self._name,
            self._files.cert,
            expired_at,
        )

    def _read_again(self) -> None:
        try:
            self._content = self._read()
        except CertificateError as error:
            self.num_refusals += 1
            logger.error("the changed %s files are not used, the previous ones are: %s", self._name, error)
        else:
            self._warned_at = -WARN_EVERY_S
            logger.info("new connections use the changed %s files", self._name)

    def _read(self) -> _Content:
        """Read and check the files. Raises CertificateError."""
        files = self._files
        key, cert = _read_file(files.key, "key"), _read_file(files.cert, "cert")
        pem = Pem(cert, key, _read_file(files.ca, "client ca cert") if files.ca else None)
        with self._parsing(f"the key {files.key}"):
            own = _public_bytes(load_pem_private_key(pem.key, None).public_key())
        with self._parsing(f"the cert {files.cert}"):
            leaf = x509.load_pem_x509_certificates(pem.cert)[0]
            expires_at, of_cert = leaf.not_valid_after_utc.timestamp(), _public_bytes(leaf.public_key())
        with self._parsing(f"the ca cert {files.ca}"):
            if pem.ca is not None:
                x509.load_pem_x509_certificates(pem.ca)
        if of_cert != own:
            raise CertificateError(
                f"{self._prefix}: the key {files.key} does not belong to the cert {files.cert}"
            )
        try:
            context = self._make_context(pem) if self._make_context else None
        except OSError as error:
            reason = error.strerror or error
            raise CertificateError(
                f"{self._prefix}: the cert {files.cert} and the key {files.key} cannot be used: {reason}"
            ) from error
        return _Content(pem, context, expires_at)

    @contextmanager
    def _parsing(self, file: str) -> Iterator[None]:
        """Turn errors of parsing the file into CertificateError, which names the file."""
        try:
            yield
        except TypeError as error:  # only a key raises it
            raise CertificateError(
                f"{self._prefix}: {file} is encrypted; provide one without a password"
            ) from error
        except (ValueError, UnsupportedAlgorithm) as error:
            raise CertificateError(
                f"{self._prefix}: {file} is damaged or not a PEM file of its kind"
            ) from error

    @property
    def _prefix(self) -> str:
        return f"{self._name.lower()} configuration error"

    def _changed_configuration(self) -> grpc.ServerCertificateConfiguration | None:
        """Return the configuration if changed. gRPC calls this on its own threads before each handshake."""
        self.refresh()
        with self._lock:
            if self._used_by_grpc is self._content:
                return None
            self._used_by_grpc = self._content
            return self._content.configuration

    def _file_versions(self) -> list[tuple[int, int, int] | None]:
        return [file_version(path) for path in (self._files.cert, self._files.key, self._files.ca) if path]


def port_certificates(options: PortOptions) -> Certificates | None:
    """Return the certificates of the client ports, or None if they use no TLS. Raises CertificateError."""
    if not options.tls_cert_path or not options.tls_key_path:
        return None
    files = TlsFiles(options.tls_cert_path, options.tls_key_path, options.tls_client_ca_cert_path)
    return Certificates(files, server_context if options.http_tls else None)


def link_certificates(options: LinkOptions, make_context: Callable[[Pem], ssl.SSLContext]) -> Certificates:
    """Return the certificates of this end of TCP links. Raises CertificateError."""
    cert, key, ca = options.link_cert_path, options.link_key_path, options.link_ca_cert_path
    assert cert is not None, "the options have been checked"
    assert key is not None
    assert ca is not None
    return Certificates(TlsFiles(cert, key, ca), make_context, "link")


def file_version(path: str) -> tuple[int, int, int] | None:
    """Return what differs after each change of the file or of a link's target; None if there is no file."""
    try:
        found = Path(path).stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def _read_file(path: str, what: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise CertificateError(f"couldn't load {what} from {path}: {error.strerror}") from error


def _public_bytes(key: CertificatePublicKeyTypes | PublicKeyTypes) -> bytes:
    return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def server_context(pem: Pem) -> ssl.SSLContext:
    """Return the context of a port that asks clients for no certificate. Raises SSLError."""
    context = _context(pem, ssl.PROTOCOL_TLS_SERVER)
    context.num_tickets = 0
    return context


def mutual_server_context(pem: Pem) -> ssl.SSLContext:
    """Return the context of a port for clients whose certificate the authorities signed. Raises SSLError."""
    context = server_context(pem)
    context.verify_mode = ssl.CERT_REQUIRED
    _trust(context, pem)
    return context


def mutual_client_context(pem: Pem) -> ssl.SSLContext:
    """Return the context of a client with a certificate that checks the server's name. Raises SSLError."""
    context = _context(pem, ssl.PROTOCOL_TLS_CLIENT)
    _trust(context, pem)
    return context


def client_name(connection: ssl.SSLObject | None) -> str:
    """Return the first alternative name of a client's certificate, else its common name, else nothing."""
    certificate: dict[str, Any] = (connection.getpeercert() if connection is not None else None) or {}
    for _, name in certificate.get("subjectAltName", ()):
        return str(name)
    names = dict(pair for part in certificate.get("subject", ()) for pair in part)
    return str(names.get("commonName", ""))


def _context(pem: Pem, protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(CIPHERS)
    # Every connection must show its certificate, which one resumed by a session ticket would not.
    context.options |= ssl.OP_NO_TICKET | ssl.OP_NO_RENEGOTIATION
    with _in_memory(pem.cert + b"\n" + pem.key) as path:
        context.load_cert_chain(path)
    return context


def _trust(context: ssl.SSLContext, pem: Pem) -> None:
    assert pem.ca is not None, "mutual TLS needs authorities to check the other end"
    with _in_memory(pem.ca) as path:
        context.load_verify_locations(path)


@contextmanager
def _in_memory(content: bytes) -> Iterator[str]:
    """Yield a path of the content: SSL contexts read only paths, and the file on disk may have changed."""
    file = os.memfd_create("pem")
    try:
        os.write(file, content)
        yield f"/proc/self/fd/{file}"
    finally:
        os.close(file)
