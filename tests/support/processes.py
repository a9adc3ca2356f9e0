"""Real processes for tests: started like a user would, recognized by their output, and always stopped."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from grpc import Channel, insecure_channel

from tests.support import forked_process
from tests.support.forked_process import ForkedProcess
from tests.support.spread_channel import spread_channel

LEAKED = re.compile(
    r"leaked (request|block|row|permit|tokenize permit|content): "
)  # include a router's last output
ADDRESSES = re.compile(r"serving gRPC on (\S+):(\d+), HTTP on (\S+):(\d+)")

FORKED = ("router", "engine")
"""Commands whose processes are forked, for the sake of the time that their imports take."""


class Service:
    """Router or launcher with free ports on loopback."""

    def __init__(
        self,
        command: list[str],
        env: dict[str, str] | None = None,
        module: str = "tgis",
        python: Sequence[str] = (sys.executable,),
        num_routers: int | None = None,
    ) -> None:
        """Start the process. It serves when `num_routers` of its processes have reported that; None: the
        number in its options."""
        environment = {**forked_process.FIXED_ENV, **os.environ, **(env or {})}
        self.num_routers = num_routers or num_workers(command, environment)
        self._num_awaited = self.num_routers
        self.lines: list[str] = []
        self.grpc_port = self.http_port = 0
        self._serving = threading.Event()
        can_fork = module == forked_process.MODULE and tuple(python) == (sys.executable,)
        if can_fork and command[0] in FORKED and forked_process.has_usual_env(environment):
            self.process: subprocess.Popen[str] | ForkedProcess = ForkedProcess(command, environment)
        else:
            self.process = subprocess.Popen(
                [*python, "-m", module, *command],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                env=environment,
            )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            if match := ADDRESSES.search(line):
                self.grpc_port, self.http_port = int(match[2]), int(match[4])
                self._num_awaited -= 1
                if self._num_awaited <= 0:
                    self._serving.set()
        self._serving.set()

    def wait_until_serving(self, timeout_s: float = 120) -> "Service":
        if not self._serving.wait(timeout_s):
            self._serving.wait(1)  # this process may have stood still meanwhile
        if not self.grpc_port:
            self.end()
            raise AssertionError(f"does not serve:\n{self.output}")
        return self

    def wait_for_line(self, text: str, timeout_s: float = 60, begin: int = 0) -> None:
        """Wait for a line with a text among all lines from number `begin` on."""
        deadline = time.monotonic() + timeout_s
        while not any(text in line for line in self.lines[begin:]):
            assert time.monotonic() < deadline, f"never printed {text!r}:\n{self.output}"
            time.sleep(0.05)

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    @property
    def http(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    def channel(self) -> Channel:
        """Return a channel whose calls reach all router workers, if suites run again with several."""
        target, is_again = f"127.0.0.1:{self.grpc_port}", "ROUTER_WORKERS" in os.environ
        return spread_channel(target) if is_again else insecure_channel(target)

    def end(self, number: signal.Signals = signal.SIGTERM, timeout_s: float = 30) -> int:
        """End the process, which may have ended before, and return its exit code. A router must have released
        all resources."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            code = self.process.wait(timeout_s)
        finally:
            self.process.kill()
            self.process.wait()
            self._reader.join()
            assert self.process.stdout is not None
            self.process.stdout.close()
        assert not LEAKED.search(self.output), self.output
        return code


def num_workers(command: Sequence[str], env: Mapping[str, str]) -> int:
    """Return the number of router workers that a launcher is configured to start; 1 for other commands."""
    if "--router-workers" in command:
        return int(command[command.index("--router-workers") + 1])
    return int(env["ROUTER_WORKERS"]) if "launcher" in command else 1


def children_of(pid: int) -> dict[str, list[int]]:
    """Return the process ids below `pid`, by their tgis command."""
    result: dict[str, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
                words = (entry / "cmdline").read_text(errors="replace").split("\0")
            except OSError:
                continue  # it has just ended
            if parent == pid and "tgis" in words:
                result.setdefault(words[words.index("tgis") + 1], []).append(int(entry.name))
    return result
