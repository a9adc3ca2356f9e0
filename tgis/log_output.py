"""Writes to stderr without waiting for its reader, so that a collector of the log that stops reading cannot
stop the service."""

import atexit
import contextlib
import io
import logging
import os
import select
import sys
import threading
import time
from collections import deque
from typing import Any

logger = logging.getLogger(__name__)

MAX_WAITING_BYTES = 1 << 20
STALLED_S = 1.0
"""Time without a read after which the reader counts as stalled."""
MAX_WAIT_S = 5.0
"""Maximum time that the end of the process waits for the reader, even a stalled one, because the last lines
have the reason for the end."""
STDERR = 2
_POLL_S = 0.01


class LogOutput(io.RawIOBase):
    """Stream to a descriptor. While the reader has left no room, text waits, and a thread writes it later.

    If `MAX_WAITING_BYTES` wait, further writes are omitted. When all that waits has been read, a line of the
    log has the number of omitted ones."""

    def __init__(self, fd: int) -> None:
        super().__init__()
        self._fd = fd
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)
        self.reset()

    def reset(self) -> None:
        """Begin without waiting text, as in a forked process, whose parent writes what waits."""
        self._lock = threading.RLock()  # a finalizer may log while its thread writes
        self._waiting = deque[memoryview]()
        self._num_waiting_bytes = 0
        self._num_omitted = 0
        self._has_thread = False
        self._last_progress = time.monotonic()

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return os.isatty(self._fd)

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        """Write bytes now if there is room, else later. Never raises OSError, as if a reader had read it."""
        content = memoryview(bytes(data))
        with self._lock:
            if not self._waiting:
                if rest := self._write_some(content):
                    self._last_progress = time.monotonic()
                    self._keep(rest)
            elif self.is_full:
                self._num_omitted += 1
                self._start_thread()
            else:
                self._keep(content)
        return len(content)

    @property
    def is_full(self) -> bool:
        return self._num_waiting_bytes >= MAX_WAITING_BYTES

    @property
    def is_stalled(self) -> bool:
        """True if text waits and nothing has been read for `STALLED_S`."""
        return bool(self._waiting) and time.monotonic() - self._last_progress > STALLED_S

    def wait(self) -> None:
        """Wait until all text is written, also the number of omitted lines, at most `MAX_WAIT_S`."""
        deadline = time.monotonic() + MAX_WAIT_S
        while (self._waiting or self._has_thread) and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def wait_for_room(self) -> None:
        """Wait until the next write is not omitted, or the reader has stalled."""
        while self.is_full and not self.is_stalled:
            time.sleep(_POLL_S)

    def _write_some(self, content: memoryview) -> memoryview:
        """Write as much as there is room for, and return the rest. A closed pipe takes everything."""
        with contextlib.suppress(OSError):
            while content and self._poll.poll(0):  # a pipe then has room for PIPE_BUF bytes
                content = content[os.write(self._fd, content[: select.PIPE_BUF]) :]
            return content
        return content[:0]

    def _keep(self, rest: memoryview) -> None:
        self._waiting.append(rest)
        self._num_waiting_bytes += len(rest)
        self._start_thread()

    def _start_thread(self) -> None:
        """Start the thread that writes what waits. If the system has none, the next write tries again."""
        if not self._has_thread:
            with contextlib.suppress(RuntimeError):
                threading.Thread(target=self._write_waiting, name="log output", daemon=True).start()
                self._has_thread = True

    def _write_waiting(self) -> None:
        """Write what waits, and then log the number of omitted lines."""
        poll = select.poll()
        poll.register(self._fd, select.POLLOUT)
        while num_omitted := self._write_all(poll):
            logger.warning("%d lines of the log were omitted, because stderr was not read", num_omitted)

    def _write_all(self, poll: select.poll) -> int:
        """Write until nothing waits. Return the number of lines omitted until now; 0 ends the thread."""
        while True:
            with self._lock:
                if not self._waiting:
                    num_omitted, self._num_omitted = self._num_omitted, 0
                    self._has_thread = num_omitted > 0
                    return num_omitted
            poll.poll()
            with self._lock:
                self._write_oldest()

    def _write_oldest(self) -> None:
        """Write the oldest waiting text, as much as there is room for."""
        oldest = self._waiting[0]  # stays there meanwhile, because the process may end when nothing waits
        rest = self._write_some(oldest)
        self._num_waiting_bytes -= len(oldest) - len(rest)
        if len(rest) < len(oldest):
            self._last_progress = time.monotonic()
        if rest:
            self._waiting[0] = rest
        else:
            self._waiting.popleft()


def install() -> None:
    """Replace `sys.stderr` in a process that serves. Nothing is replaced if a test has already done so."""
    _open_standard_files()
    if sys.stderr is not sys.__stderr__:
        return
    output = LogOutput(STDERR)
    encoding = "utf-8" if sys.stderr is None else sys.stderr.encoding
    sys.stderr = io.TextIOWrapper(output, encoding, "backslashreplace", line_buffering=True)
    os.register_at_fork(after_in_child=output.reset)
    atexit.register(output.wait)


def _open_standard_files() -> None:
    """Open /dev/null in place of closed standard files. Otherwise sockets get their numbers, and libraries
    print to sockets."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= STDERR:
        os.set_inheritable(fd, True)
    os.close(fd)


def installed() -> LogOutput | None:
    """Return the output that `install` has installed."""
    output = getattr(sys.stderr, "buffer", None)
    return output if isinstance(output, LogOutput) else None
