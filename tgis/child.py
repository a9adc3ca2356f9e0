"""A child process that cannot outlive its parent: its output is relayed line by line, and how it ended is put
in words."""

import asyncio
import contextlib
import ctypes
import functools
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from types import MappingProxyType

from tgis.heartbeat import wait_until_hung

ERROR_PREFIX = "error: "  # begins a process's last words, the one line that says why it failed
MAX_LINE_BYTES = 1 << 16
PR_SET_PDEATHSIG = 1

_libc = ctypes.CDLL(None)


class Child:
    """One run of `python -m tgis ARGUMENTS`."""

    def __init__(
        self,
        name: str,
        arguments: list[str],
        line_prefix: str = "",
        env: Mapping[str, str] = MappingProxyType({}),
        beats: bool = False,
        fds: Sequence[int] = (),
    ) -> None:
        """`env` holds variables that the child gets where the parent has none of that name. One that `beats`
        is given a descriptor for signs of life, and is killed where it hangs; `fds` are open in it too."""
        self.name, self._arguments, self._line_prefix, self._env = name, arguments, line_prefix, env
        self._beats, self._hangs, self._fds = beats, False, tuple(fds)
        self.has_begun = asyncio.Event()
        """To give signs of life."""
        self._error = ""
        self._process: asyncio.subprocess.Process | None = None
        self._end: asyncio.Task[str] | None = None
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> None:
        if not self._beats:
            await self._start([])
            return
        reader, writer = os.pipe()
        try:
            await self._start(["--heartbeat-fd", str(writer)], writer)
        except BaseException:
            os.close(reader)
            raise
        finally:
            os.close(writer)
        self._watch = asyncio.create_task(self._end_if_hung(reader), name=f"{self.name}'s heart")

    async def _start(self, more: list[str], *fds: int) -> None:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tgis",
            *self._arguments,
            *more,
            pass_fds=(*self._fds, *fds),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**self._env, **os.environ},
            preexec_fn=functools.partial(die_with, os.getpid()),
            process_group=0,  # a terminal's Ctrl-C is the parent's alone
        )
        self._end = asyncio.create_task(self._run_to_end(self._process), name=self.name)

    async def wait(self) -> str:
        """How it ended, in words, once it has; may be awaited by several and given up by any."""
        assert self._end is not None, "wait comes after start"
        return await asyncio.shield(self._end)

    def signal(self, number: signal.Signals) -> None:
        """Does nothing to a process that has ended or was never started."""
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)

    async def kill(self) -> None:
        self.signal(signal.SIGKILL)
        if self._end is not None:
            await self._end

    async def _end_if_hung(self, fd: int) -> None:
        await wait_until_hung(fd, self.has_begun)
        self._hangs = True
        self.signal(signal.SIGKILL)

    async def _run_to_end(self, process: asyncio.subprocess.Process) -> str:
        assert process.stdout is not None
        async for line in _lines(process.stdout):
            if line.startswith(ERROR_PREFIX):
                self._error = line.removeprefix(ERROR_PREFIX)
            else:
                with contextlib.suppress(
                    OSError
                ):  # nobody reads our stderr any more: the child must not block on it
                    print(self._line_prefix + line, file=sys.stderr, flush=True)
        code = await process.wait()
        if self._watch is not None:
            self._watch.cancel()
        return self._describe(code)

    def _describe(self, code: int) -> str:
        if self._hangs:
            return f"{self.name} hung and was killed"
        if code >= 0:
            return f"{self.name}: {self._error}" if self._error else f"{self.name} exited with code {code}"
        hint = "; was it out of memory?" if -code == signal.SIGKILL else ""
        return f"{self.name} was killed by {signal.Signals(-code).name}{hint}"


def die_with(parent: int) -> None:
    """Ask the kernel to kill this process when `parent` ends."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before we asked
        os.kill(os.getpid(), signal.SIGKILL)


async def _lines(stream: asyncio.StreamReader) -> AsyncIterator[str]:
    """Lines as text; one without an end is cut into pieces, so that a flood needs no memory."""
    pending = b""
    while chunk := await stream.read(MAX_LINE_BYTES):
        *lines, pending = (pending + chunk).split(b"\n")
        if len(pending) >= MAX_LINE_BYTES:
            lines, pending = [*lines, pending], b""
        for line in lines:
            yield line.decode(errors="replace")
    if pending:
        yield pending.decode(errors="replace")
