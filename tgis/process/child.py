"""Runs a child process that cannot outlive its parent, relays its output and reports its end."""

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from tgis import log_output
from tgis.process.heartbeat import wait_until_hung
from tgis.process.json_lines import error_of
from tgis.process.output_lines import PLAIN, LineForm, read_lines

PR_SET_PDEATHSIG = 1
GIVE_UP = signal.SIGUSR1  # sent to a router if its shards will not be restarted
PARENT = "TGIS_PARENT"  # variable with the parent's process id
NO_VARIABLES: Mapping[str, str] = MappingProxyType({})

_libc = ctypes.CDLL(None)


@dataclass(frozen=True)
class End:
    text: str
    is_refusal: bool = False
    """True if the child exited with status 1 and an error line; a restart would end the same way."""
    is_success: bool = False
    """True if the child exited with status 0."""


class Child:
    """Child process that runs `python -m tgis ARGUMENTS`."""

    def __init__(
        self,
        name: str,
        arguments: list[str],
        line_form: LineForm = PLAIN,
        *,
        default_env: Mapping[str, str] = NO_VARIABLES,
        env: Mapping[str, str] = NO_VARIABLES,
        has_heartbeat: bool = False,
        fds: Sequence[int] = (),
    ) -> None:
        """Create the object; `start` starts the process.

        The parent's variables override those of `default_env`, and those of `env` override the parent's. A
        child with a heartbeat is killed if it hangs."""
        self.name = name
        self._arguments = arguments
        self._line_form = line_form
        self._default_env = default_env
        self._env = env
        self._has_heartbeat = has_heartbeat
        self._is_hung = False
        self._fds = tuple(fds)
        self.loaded = asyncio.Event()
        """Set by the first heartbeat of a process that does not load a model, or has loaded it."""
        self.serving = asyncio.Event()
        """Set by the first heartbeat of a router process that has started to serve."""
        self._error = ""
        self._process: asyncio.subprocess.Process | None = None
        self._end: asyncio.Task[End] | None = None
        self._watch: asyncio.Task[None] | None = None
        self._early_signal: signal.Signals | None = None
        """Signal to send once there is a process."""

    async def start(self) -> None:
        if not self._has_heartbeat:
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
        self._watch = asyncio.create_task(self._end_if_hung(reader), name=f"{self.name}'s heartbeat")

    async def _start(self, heartbeat_arguments: list[str], *fds: int) -> None:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tgis",
            *self._arguments,
            *heartbeat_arguments,
            pass_fds=(*self._fds, *fds),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            # The child itself asks the kernel to die with its parent. A preexec_fn would need a fork, which
            # aborts some children and breaks connections if gRPC has threads.
            env={**self._default_env, **os.environ, **self._env, PARENT: str(os.getpid())},
            process_group=0,  # a terminal's Ctrl-C must reach only the parent
        )
        self._end = asyncio.create_task(self._run_to_end(self._process), name=self.name)
        if self._early_signal is not None:
            self.signal(self._early_signal)

    async def wait(self) -> End:
        """Wait until the child has ended, and return its end. Several tasks may wait, and each may be
        cancelled."""
        assert self._end is not None, "wait comes after start"
        return await asyncio.shield(self._end)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, unless the child has ended. A child that has no process yet gets it when it has."""
        if self._process is None:
            self._early_signal = number
        elif self._process.returncode is None:
            # The process's own method would discard the exit status of a child that has just ended.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, number)

    async def kill(self) -> None:
        self.signal(signal.SIGKILL)
        if self._end is not None:
            await self._end

    async def _end_if_hung(self, fd: int) -> None:
        await wait_until_hung(fd, self.loaded, self.serving)
        self._is_hung = True
        self.signal(signal.SIGKILL)

    async def _run_to_end(self, process: asyncio.subprocess.Process) -> End:
        assert process.stdout is not None
        async for line in read_lines(process.stdout, self._line_form.max_bytes):
            if (error := error_of(line)) is not None:
                self._error = error
            else:
                if process.returncode is None:  # its end must be noticed in time
                    await _wait_for_room()
                self._print(line)
        code = await process.wait()
        if self._watch is not None:
            self._watch.cancel()
        is_refusal = not self._is_hung and code == 1 and bool(self._error)
        return End(self._describe(code), is_refusal, code == 0)

    def _print(self, line: str) -> None:
        with contextlib.suppress(OSError):  # if no process reads our stderr, the child must not block
            # In one write, because writes may be omitted.
            sys.stderr.write(self._line_form.apply(line) + "\n")
            sys.stderr.flush()

    def _describe(self, code: int) -> str:
        if self._is_hung:
            return f"{self.name} hung and was killed"
        if code >= 0:
            return f"{self.name}: {self._error}" if self._error else f"{self.name} exited with code {code}"
        hint = " (out of memory?)" if -code == signal.SIGKILL else ""
        return f"{self.name} was killed by {signal.Signals(-code).name}{hint}"


def die_with_parent() -> None:
    """If a `Child` has started this process, die with the parent; its own children do not inherit this."""
    if (parent := os.environ.pop(PARENT, None)) is not None:
        die_with(int(parent))


def die_with(parent: int) -> None:
    """Ask the kernel to kill this process when `parent` ends."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before the call above
        os.kill(os.getpid(), signal.SIGKILL)


async def _wait_for_room() -> None:
    """Let a child print no faster than our stderr is read, unless the reader has stalled."""
    output = log_output.installed()
    if output is not None and output.is_full:
        await asyncio.to_thread(output.wait_for_room)
