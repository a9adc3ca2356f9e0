"""Proxy between a client and a server that can simulate a lost network: connections stay open, and no data
passes."""

import contextlib
import socket
import struct
import threading


class Proxy:
    """TCP proxy on loopback."""

    def __init__(self, port: int) -> None:
        self.passes = threading.Event()
        self.passes.set()
        self._target = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._ends: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target)
                self._ends += [client, server]
                for pair in ((client, server), (server, client)):
                    self._threads.append(threading.Thread(target=self._pass_on, args=pair))
                    self._threads[-1].start()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self.passes.wait()
                target.sendall(data)

    def reset(self) -> None:
        """Reset all connections, as when a process ends that has not read everything."""
        for end in self._ends:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RD)  # wakes the thread that reads it
        for thread in self._threads[1:]:
            thread.join()
        for end in self._ends:
            end.close()

    def close(self) -> None:
        self.passes.set()
        for end in (self._listener, *self._ends):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        for thread in self._threads:
            thread.join()
