"""Holds what a connection needs: its address, the certificates and the token, whose files may be renewed at
any time, and the channel that was opened with them."""

import os
import re
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import grpc

from tgis_client.errors import ClientError, SettingsError

C = TypeVar("C")
Version = tuple[tuple[int, int, int], ...]

DEFAULT_PORT = 8033
DEFAULT_TARGET = f"localhost:{DEFAULT_PORT}"

_OTHER_NAMES = re.compile("(dns|unix|unix-abstract|vsock|ipv4|ipv6|xds|google-c2p):")
"""Begin of gRPC's names of addresses with a scheme."""
_PLAIN = re.compile(r"(?P<host>\[[^\[\]]+\]|[^:/\[\]\s]+)(:(?P<port>[0-9]+))?")


def read_target(target: str) -> str:
    """Return the target as gRPC expects it, with a port. Raises SettingsError."""
    if _OTHER_NAMES.match(target):
        return target
    plain = _PLAIN.fullmatch(target)
    if plain is None or (plain["port"] is not None and not 0 < int(plain["port"]) < 1 << 16):
        rule = "the target must be HOST or HOST:PORT of the service's gRPC port"
        raise SettingsError(f"{rule}, not {target!r}")
    return target if plain["port"] else f"{target}:{DEFAULT_PORT}"


@dataclass(frozen=True, kw_only=True)
class Tls:
    """PEM files of a TLS connection. They are read again when they change."""

    ca_cert: str | Path | None = None
    """CAs to trust; None: gRPC's default."""
    cert: str | Path | None = None
    key: str | Path | None = None
    server_name: str | None = None
    """Name in the service's certificate; None: the target's host."""

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            raise SettingsError("cert and key must be given together")

    @property
    def files(self) -> tuple[str | Path, ...]:
        return tuple(file for file in (self.ca_cert, self.key, self.cert) if file is not None)

    def version(self) -> Version:
        """Return what changes when a file is replaced. Raises OSError."""
        stats = [os.stat(file) for file in self.files]
        return tuple((each.st_mtime_ns, each.st_ino, each.st_size) for each in stats)

    def read(self) -> grpc.ChannelCredentials:
        """Read the files. Raises OSError, and ssl.SSLError if the key is not the certificate's."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        if self.cert is not None:
            context.load_cert_chain(self.cert, self.key)
        if self.ca_cert is not None:
            try:
                context.load_verify_locations(self.ca_cert)
            except ssl.SSLError as error:  # with an empty list, gRPC would trust the system's CAs
                raise OSError(f"{self.ca_cert} has no CA's certificate") from error
        files = (self.ca_cert, self.key, self.cert)
        return grpc.ssl_channel_credentials(*(Path(file).read_bytes() if file else None for file in files))


@dataclass
class OpenChannel(Generic[C]):
    channel: C
    version: Version
    num_calls: int = 0


class ChannelCache(Generic[C]):
    """Channel for new calls.

    When a TLS file has changed, it is replaced; calls in progress keep the old one."""

    def __init__(self, open_channel: Callable[[grpc.ChannelCredentials | None], C], tls: Tls | None) -> None:
        self._open_channel = open_channel
        self._tls = tls
        self._lock = threading.Lock()
        self._current: OpenChannel[C] | None = None
        self._replaced: list[OpenChannel[C]] = []
        self.is_closed = False

    def acquire(self) -> OpenChannel[C]:
        """Return the channel for a call, which must be released.

        Raises SettingsError if none is open yet and a file cannot be read."""
        with self._lock:
            if self.is_closed:
                raise ClientError("the client is closed")
            self._current = self._newest(self._current)
            self._current.num_calls += 1
            return self._current

    def release(self, used: OpenChannel[C]) -> list[C]:
        """End a call's use of its channel, and return the channels to close."""
        with self._lock:
            used.num_calls -= 1
            idle = [each.channel for each in self._replaced if each.num_calls == 0]
            self._replaced = [each for each in self._replaced if each.num_calls > 0]
            return idle

    def close(self) -> list[C]:
        """Accept no more calls, and return the channels to close."""
        with self._lock:
            self.is_closed = True
            opened = [*self._replaced, *([self._current] if self._current else [])]
            self._replaced, self._current = [], None
            return [each.channel for each in opened]

    def _newest(self, current: OpenChannel[C] | None) -> OpenChannel[C]:
        if self._tls is None:
            return current or OpenChannel(self._open_channel(None), ())
        try:
            version = self._tls.version()
            if current is not None and version == current.version:
                return current
            credentials = self._tls.read()
            is_consistent = self._tls.version() == version
        except (OSError, ssl.SSLError) as error:
            if current is None:
                raise SettingsError(f"a TLS file cannot be used: {error}") from error
            return current  # the files are being replaced
        if current is not None:
            if not is_consistent:
                return current
            self._replaced.append(current)
        return OpenChannel(self._open_channel(credentials), version)


@dataclass(frozen=True)
class BearerToken:
    """Token of every call. A file is read again for each call; its first line is the token."""

    text: str | None
    path: str | Path | None

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the metadata with the token. Raises SettingsError."""
        token = self.text
        if self.path is not None:
            try:
                token = (
                    (Path(self.path).read_bytes().splitlines() or [b""])[0].decode("utf-8", "replace").strip()
                )
            except OSError as error:
                raise SettingsError(f"the token's file cannot be read: {error}") from error
        if token is None:
            return ()
        if not token or not token.isascii() or not token.isprintable():
            raise SettingsError("the token must be a line of printable ASCII characters")
        return (("authorization", f"Bearer {token}"),)
