"""Processes that run `python -m tgis` without importing it: each is forked from a process that has imported
the router. That saves most of the time of a start."""

import atexit
import contextlib
import functools
import multiprocessing
import os
import resource
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection

MODULE = "tgis"
# Options whose defaults depend on the machine's processor, which the results of tests must not.
FIXED_ENV = {"ROUTER_WORKERS": "1", "CPU_ARITHMETIC": "float32"}
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tgis.cli.main", "tgis.router.app", __name__])


@functools.cache
def _usual_env() -> dict[str, str]:
    """Return the variables with which the process that forks is started. Libraries read some of them when
    they are imported."""
    return dict(os.environ)


def has_usual_env(env: Mapping[str, str]) -> bool:
    """Return True if a process with these variables may be forked."""
    own = {name: value for name, value in env.items() if not name.startswith("PYTEST_")}
    return own.items() <= {**FIXED_ENV, **_usual_env()}.items()


class ForkedProcess:
    """The methods of subprocess.Popen that tests use."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        reader, writer = _context.Pipe(duplex=False)
        files = resource.getrlimit(resource.RLIMIT_NOFILE)
        arguments = (writer, list(command), dict(env), os.getcwd(), files)
        self._process = _context.Process(target=_run, args=arguments, daemon=True)
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid
        self.args = [MODULE, *command]
        self.stdout = os.fdopen(os.dup(reader.fileno()), errors="replace")
        writer.close()
        reader.close()

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self.poll()
        if code is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.args, timeout)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended, and the fork server knows it first
                os.kill(self.pid, number)

    def kill(self) -> None:
        if self.poll() is None:
            self._process.kill()


def _run(
    output: Connection, command: list[str], env: Mapping[str, str], directory: str, files: tuple[int, int]
) -> None:
    """Give this process the state that a new one would have, and run the command."""
    sys.stdout.flush()
    for fd in (1, 2):
        os.dup2(output.fileno(), fd)
    output.close()
    os.environ.clear()
    os.environ.update(env)
    os.chdir(directory)
    resource.setrlimit(resource.RLIMIT_NOFILE, files)
    sys.argv = [MODULE, *command]
    try:
        runpy.run_module(MODULE, run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()
