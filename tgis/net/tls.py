"""Loads certificates from PEM files, for gRPC and for Python's TLS: TLS 1.2 with ECDHE and AES-GCM, or TLS
1.3.

New connections use changed files, unless they are incomplete or do not fit together."""

import asyncio
import errno
import logging
import os
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import grpc

from tgis.config.network import LinkOptions, PortOptions
from tgis.errors import OperatorError
from tgis.log_limits import KIND

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.types import CertificatePublicKeyTypes, PublicKeyTypes

logger = logging.getLogger(__name__)

REFRESH_S = 5.0  # between two checks of the files; each new connection checks them too
LACKING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
EXPIRES_SOON_S = 7 * 86400.0
WARN_EVERY_S = 86400.0
EXPIRED_EVERY_S = 60.0
CIPHERS = "ECDHE+AESGCM"  # for TLS 1.2; all ciphers of TLS 1.3 have the same properties


@dataclass(frozen=True)
class TlsFiles:
    """Paths of the PEM files."""

    cert: str
    key: str
    ca: str | None
    """CA that must have signed the peer's certificate; None: the peer needs no certificate."""


@dataclass(frozen=True, eq=False)
class Pem:
    """PEM texts of the own certificate and key, and of the trusted CAs."""

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
    """Certificates from the last valid version of the files."""

    def __init__(
        self,
        files: TlsFiles,
        make_context: Callable[[Pem], ssl.SSLContext] | None = None,
        name: str = "TLS",
    ) -> None:
        """Read the files. Without `make_context`, there is no `context`. Raises CertificateError."""
        self._files = files
        self._make_context = make_context
        self._name = name
        self._lock = threading.Lock()
        self._versions = self._file_versions()
        self._content = self._used_by_grpc = self._read()
        self._warned_at = -WARN_EVERY_S
        self.num_refusals = 0
        """Number of changes of the files that were refused."""
        self._warn_if_expiring()

    @property
    def seconds_left(self) -> float:
        return self._content.expires_at - time.time()

    @property
    def pem(self) -> Pem:
        """PEM texts in use; a new object after each accepted change."""
        return self._content.pem

    @property
    def context(self) -> ssl.SSLContext:
        assert self._content.context is not None, "certificates without make_context have no context"
        return self._content.context

    def renewing_context(self) -> ssl.SSLContext:
        """Return a server's context whose handshakes use the current certificates."""

        def renew(connection: ssl.SSLObject, name: str, context: ssl.SSLContext) -> None:
            self.refresh()
            connection.context = self.context

        context = self.context
        context.sni_callback = renew  # called in every handshake, even if the client sends no name
        return context

    def client_port_context(self) -> ssl.SSLContext:
        """Return a server's context whose handshakes use the current certificates, and that asks clients for
        a certificate if there is a CA. Raises CertificateError."""
        make = mutual_server_context if self._files.ca else server_context
        known = self.pem
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
        """Check the files periodically, so that an error is logged before a client is refused because of
        it."""
        while True:
            await asyncio.sleep(REFRESH_S)
            with suppress(RuntimeError):  # if the system has no thread left, the next check may have one
                await asyncio.to_thread(self.refresh)

    def refresh(self) -> None:
        """Read changed files and use them if they are valid. Log a certificate that expires soon or has
        expired."""
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
            "the %s certificate %s expired at %s: peers refuse it; renew it",
            self._name,
            self._files.cert,
            expired_at,
        )

    def _read_again(self) -> None:
        try:
            self._content = self._read()
        except CertificateError as error:
            extra: dict[str, str] = {}
            if is_temporary(error):
                self._versions = []  # read them again at the next check
                extra = {KIND: "TLS not read"}
            else:
                self.num_refusals += 1
            text = "the changed %s files are not used; the previous ones stay in use: %s"
            logger.error(text, self._name, error, extra=extra)
        else:
            self._warned_at = -WARN_EVERY_S
            logger.info("new connections use the changed %s files", self._name)

    def _read(self) -> _Content:
        """Read and check the files. Raises CertificateError."""
        # Only here, because its import takes a twentieth of a second of every process's start.
        from cryptography import x509
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        files = self._files
        key = _read_file(files.key, "key")
        cert = _read_file(files.cert, "cert")
        pem = Pem(cert, key, _read_file(files.ca, "client ca cert") if files.ca else None)
        with self._parsing(f"the key {files.key}"):
            key_bytes = _public_bytes(load_pem_private_key(pem.key, None).public_key())
        with self._parsing(f"the cert {files.cert}"):
            leaf = x509.load_pem_x509_certificates(pem.cert)[0]
            expires_at = leaf.not_valid_after_utc.timestamp()
            cert_bytes = _public_bytes(leaf.public_key())
        with self._parsing(f"the ca cert {files.ca}"):
            if pem.ca is not None:
                x509.load_pem_x509_certificates(pem.ca)
        if cert_bytes != key_bytes:
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
        """Convert parse errors in the block to a CertificateError that names the file."""
        from cryptography.exceptions import UnsupportedAlgorithm

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
        """Return the configuration if it changed. gRPC calls this from its own threads before each
        handshake."""
        self.refresh()
        with self._lock:
            if self._used_by_grpc is self._content:
                return None
            self._used_by_grpc = self._content
            return self._content.configuration

    def _file_versions(self) -> list[tuple[int, int, int] | None]:
        return [file_version(path) for path in (self._files.cert, self._files.key, self._files.ca) if path]


def port_certificates(options: PortOptions) -> Certificates | None:
    """Return the certificates of the public ports, or None without TLS. Raises CertificateError."""
    if not options.tls_cert_path or not options.tls_key_path:
        return None
    files = TlsFiles(options.tls_cert_path, options.tls_key_path, options.tls_client_ca_cert_path)
    return Certificates(files, server_context if options.http_tls else None)


def link_certificates(options: LinkOptions, make_context: Callable[[Pem], ssl.SSLContext]) -> Certificates:
    """Return this process's certificates for TCP links. Raises CertificateError."""
    cert = options.link_cert_path
    key = options.link_key_path
    ca = options.link_ca_cert_path
    assert cert is not None, "the options have been checked"
    assert key is not None
    assert ca is not None
    return Certificates(TlsFiles(cert, key, ca), make_context, "link")


def file_version(path: str) -> tuple[int, int, int] | None:
    """Return a value that changes with the file, or with a link's target; None if there is no file."""
    try:
        status = Path(path).stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


def is_temporary(error: OperatorError) -> bool:
    """Return True if a file could not be read because the process or the system lacks descriptors or
    memory."""
    return isinstance(error.__cause__, OSError) and error.__cause__.errno in LACKING


def _read_file(path: str, what: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise CertificateError(f"couldn't load {what} from {path}: {error.strerror}") from error


def _public_bytes(key: "CertificatePublicKeyTypes | PublicKeyTypes") -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def server_context(pem: Pem) -> ssl.SSLContext:
    """Return the context of a port that does not ask clients for a certificate. Raises SSLError."""
    context = _context(pem, ssl.PROTOCOL_TLS_SERVER)
    context.num_tickets = 0
    return context


def mutual_server_context(pem: Pem) -> ssl.SSLContext:
    """Return the context of a port that requires clients' certificates. Raises SSLError."""
    context = server_context(pem)
    context.verify_mode = ssl.CERT_REQUIRED
    _trust(context, pem)
    return context


def mutual_client_context(pem: Pem) -> ssl.SSLContext:
    """Return the context of a client that has a certificate and checks the server's name. Raises SSLError."""
    context = _context(pem, ssl.PROTOCOL_TLS_CLIENT)
    _trust(context, pem)
    return context


def client_name(connection: ssl.SSLObject | None) -> str:
    """Return the first alternative name of a client's certificate, else its common name, else an empty
    text."""
    certificate: dict[str, Any] = (connection.getpeercert() if connection is not None else None) or {}
    for _, name in certificate.get("subjectAltName", ()):
        return str(name)
    names = dict(pair for part in certificate.get("subject", ()) for pair in part)
    return str(names.get("commonName", ""))


def _context(pem: Pem, protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(CIPHERS)
    # Every connection must present a certificate; connections resumed by a session ticket would not.
    context.options |= ssl.OP_NO_TICKET | ssl.OP_NO_RENEGOTIATION
    with _in_memory(pem.cert + b"\n" + pem.key) as path:
        context.load_cert_chain(path)
    return context


def _trust(context: ssl.SSLContext, pem: Pem) -> None:
    assert pem.ca is not None, "mutual TLS needs a CA"
    with _in_memory(pem.ca) as path:
        context.load_verify_locations(path)


@contextmanager
def _in_memory(content: bytes) -> Iterator[str]:
    """Yield a path of an in-memory file: SSL contexts read only paths, and the file on disk may have
    changed."""
    file = os.memfd_create("pem")
    try:
        os.write(file, content)
        yield f"/proc/self/fd/{file}"
    finally:
        os.close(file)
