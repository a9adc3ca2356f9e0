"""Processes of ranks, forked from a copy of this process that has imported everything and runs nothing."""

import gc
import multiprocessing
import os
import signal
import socket
import warnings
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import connection
from multiprocessing.connection import Connection
from typing import Any

PID_BYTES = 8
_context = multiprocessing.get_context("fork")


class RankForker:
    """Starts processes that call `function` with their end of a pipe. They know what this process knew when
    the forker was created, which must be before any other thread may hold a lock."""

    def __init__(self, function: Callable[[Connection], Any]) -> None:
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = _context.Process(target=_fork_on_request, args=(self._control, theirs, function))
            with warnings.catch_warnings():
                # Python 3.12 warns of forks beside threads. Those of pytest hold no lock that ranks need.
                warnings.simplefilter("ignore", DeprecationWarning)
                self._process.start()

    def fork(self) -> "ForkedRank":
        ours, theirs = multiprocessing.Pipe()
        with theirs:
            socket.send_fds(self._control, [b"\0"], [theirs.fileno()])
            pid = self._control.recv(PID_BYTES)
        assert len(pid) == PID_BYTES, "the process that forks ranks has ended"
        return ForkedRank(int.from_bytes(pid), ours)

    def stop(self) -> None:
        """Wait until all ranks have ended; each ends with its pipe."""
        self._control.close()
        self._process.join()


class ForkedRank:
    """Process of a rank. Its descriptor never means another process that has got its number."""

    def __init__(self, pid: int, pipe: Connection) -> None:
        self.pipe = pipe
        self._descriptor = os.pidfd_open(pid)

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)

    def join(self) -> None:
        """Wait for the end, and close the pipe."""
        connection.wait([self._descriptor])
        os.close(self._descriptor)
        self.pipe.close()


def _fork_on_request(
    theirs: socket.socket, ours: socket.socket, function: Callable[[Connection], Any]
) -> None:
    """Fork a process for each descriptor of a pipe that arrives. When no more can arrive, wait for all."""
    theirs.close()
    gc.freeze()  # what the processes share is no garbage
    gc.enable()
    ranks = []
    while True:
        _, descriptors, _, _ = socket.recv_fds(ours, 1, 1)
        if not descriptors:
            break
        with Connection(descriptors[0]) as pipe:
            rank = _context.Process(target=function, args=(pipe,))
            rank.start()
        assert rank.pid is not None
        ours.send(rank.pid.to_bytes(PID_BYTES))
        ranks.append(rank)
    for rank in ranks:
        rank.join()
