"""Files for links over TCP: certificates for both ends, adjacent ports, and a relay between the ends that can
be cut."""

import contextlib
import random
import socket
import ssl
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import trustme


@dataclass(frozen=True)
class LinkFiles:
    """Certificate, key and authority of one end."""

    directory: Path

    def path(self, name: str) -> Path:
        """Return the path of `cert`, `key` or `ca`."""
        return self.directory / f"{name}.pem"

    @property
    def flags(self) -> list[str]:
        cert, key, ca = (str(self.path(name)) for name in ("cert", "key", "ca"))
        return ["--link-cert-path", cert, "--link-key-path", key, "--link-ca-cert-path", ca]

    def write(self, own: trustme.CA, name: str, other: trustme.CA | None = None, **more: Any) -> "LinkFiles":
        """Write the files. `own` signs this end's certificate, `other` the other end's if it differs."""
        self.directory.mkdir(exist_ok=True)
        leaf = own.issue_cert(name, **more)
        texts = {
            "key": leaf.private_key_pem,
            "cert": leaf.cert_chain_pems[0],
            "ca": (other or own).cert_pem,
        }
        for file, text in texts.items():
            text.write_to_path(self.directory / f"{file}.new")
            (self.directory / f"{file}.new").replace(self.path(file))
        return self

    @property
    def credentials(self) -> grpc.ChannelCredentials:
        pem = [self.path(name).read_bytes() for name in ("ca", "key", "cert")]
        return grpc.ssl_channel_credentials(*pem)


def free_ports() -> int:
    """Return the first of two adjacent free ports that the system does not assign by itself."""
    while True:
        port = random.randrange(20000, 32000, 2)
        with contextlib.suppress(OSError):
            for one in (port, port + 1):
                socket.create_server(("127.0.0.1", one)).close()
            return port


class Relay:
    """Relay for both ports of a shard."""

    def __init__(self, shard_port: int) -> None:
        self.port = free_ports()
        self._ends: list[socket.socket] = []
        self._listeners = [socket.create_server(("127.0.0.1", self.port + i)) for i in range(2)]
        self._threads = [
            threading.Thread(target=self._accept, args=(listener, shard_port + i))
            for i, listener in enumerate(self._listeners)
        ]
        for thread in self._threads:
            thread.start()

    def cut(self) -> None:
        """Cut all connections between the ends. New connections are possible."""
        ends, self._ends = self._ends, []
        _shut(*ends)

    def stop(self) -> None:
        _shut(*self._listeners)
        self.cut()
        for thread in self._threads:
            thread.join()

    def _accept(self, listener: socket.socket, port: int) -> None:
        with listener:
            while True:
                try:
                    near, _ = listener.accept()
                except OSError:
                    return
                try:
                    far = socket.create_connection(("127.0.0.1", port))
                except OSError:
                    near.close()
                    continue
                self._ends += [near, far]
                thread = threading.Thread(target=_relay, args=(near, far))
                thread.start()
                self._threads.append(thread)


def _relay(near: socket.socket, far: socket.socket) -> None:
    with near, far:
        back = threading.Thread(target=_pass_on, args=(far, near))
        back.start()
        _pass_on(near, far)
        back.join()


def _pass_on(one: socket.socket, other: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := one.recv(1 << 16):
            other.sendall(data)
    _shut(one, other)


def _shut(*ends: socket.socket) -> None:
    for end in ends:
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def is_refused(port: int, context: ssl.SSLContext) -> bool:
    """Return whether the other end closes the connection immediately."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as plain:
        try:
            with context.wrap_socket(plain, server_hostname="localhost") as connection:
                return connection.recv(1) == b""
        except TimeoutError:
            return False
        except OSError:
            return True
