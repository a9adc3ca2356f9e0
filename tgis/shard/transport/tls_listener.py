"""Accepts TLS streams over TCP for a thread that waits with poll.

A second thread does the handshakes and passes on connections with a valid certificate. Other connections
neither reach nor delay the waiting thread."""

import logging
import os
import selectors
import socket
import ssl
import threading
import time
from collections import deque

from tgis.net.addresses import configure_socket
from tgis.net.tls import REFRESH_S, Certificates

logger = logging.getLogger(__name__)

HANDSHAKE_S = 5.0
MAX_HANDSHAKES = 32  # concurrency limit; a further handshake aborts the oldest
CHECK_S = 1.0  # between two checks for handshakes that take too long
SEND_S = 10.0  # a router that reads no answers must not block the next router for ever


class TlsConnection:
    """Encrypted stream. `recv` reads all decrypted bytes from the TLS layer, because poll cannot see them
    there."""

    def __init__(self, connection: ssl.SSLSocket) -> None:
        self._connection = connection

    def fileno(self) -> int:
        return self._connection.fileno()

    def recv(self, size: int) -> bytes:
        self._connection.settimeout(0)  # the readable bytes may be a partial TLS record or one without data
        try:
            data = self._connection.recv(size)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
            raise BlockingIOError from error
        while waiting := self._connection.pending():
            data += self._connection.recv(waiting)
        return data

    def sendall(self, data: bytes) -> None:
        self._connection.settimeout(SEND_S)
        self._connection.sendall(data)

    def close(self) -> None:
        self._connection.close()


class TlsListener:
    def __init__(self, listener: socket.socket, certificates: Certificates) -> None:
        self._listener = listener
        self._certificates = certificates
        self._ready: deque[TlsConnection] = deque()
        self._num_ready = os.eventfd(0, os.EFD_SEMAPHORE)
        self._deadlines: dict[ssl.SSLSocket, float] = {}  # oldest first
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        threading.Thread(target=self._run, name="handshakes", daemon=True).start()

    def fileno(self) -> int:
        return self._num_ready

    def accept(self) -> TlsConnection:
        os.eventfd_read(self._num_ready)
        return self._ready.popleft()

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select(CHECK_S if self._deadlines else REFRESH_S):
                if isinstance(key.fileobj, ssl.SSLSocket):
                    self._continue_handshake(key.fileobj)
                else:
                    self._begin()
            now = time.monotonic()
            for late in [each for each, deadline in self._deadlines.items() if deadline < now]:
                self._abort(late, "it took too long")
            self._certificates.refresh()

    def _begin(self) -> None:
        try:
            plain, _ = self._listener.accept()
        except BlockingIOError:
            return  # the client has disconnected again
        except OSError as error:
            logger.warning("cannot accept a connection: %s", error)
            time.sleep(CHECK_S)  # avoids a flood of log lines
            return
        if len(self._deadlines) >= MAX_HANDSHAKES:
            self._abort(next(iter(self._deadlines)), "too many others were in progress")
        self._certificates.refresh()
        try:
            configure_socket(plain)
            plain.setblocking(False)
            connection = self._certificates.context.wrap_socket(
                plain, server_side=True, do_handshake_on_connect=False
            )
        except OSError as error:
            logger.debug("a connection ended before its TLS handshake: %s", error)
            plain.close()
            return
        self._deadlines[connection] = time.monotonic() + HANDSHAKE_S
        self._selector.register(connection, selectors.EVENT_READ)

    def _continue_handshake(self, connection: ssl.SSLSocket) -> None:
        if connection not in self._deadlines:
            return  # aborted after it became ready
        try:
            connection.do_handshake()
        except ssl.SSLWantReadError:
            self._selector.modify(connection, selectors.EVENT_READ)
        except ssl.SSLWantWriteError:
            self._selector.modify(connection, selectors.EVENT_WRITE)
        except OSError as error:
            self._abort(connection, error)
        else:
            self._forget(connection)
            self._ready.append(TlsConnection(connection))
            os.eventfd_write(self._num_ready, 1)

    def _abort(self, connection: ssl.SSLSocket, reason: object) -> None:
        logger.debug("a TLS handshake failed: %s", reason)
        self._forget(connection)
        connection.close()

    def _forget(self, connection: ssl.SSLSocket) -> None:
        self._selector.unregister(connection)
        del self._deadlines[connection]
