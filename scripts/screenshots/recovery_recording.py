"""Records `tgis client stream` while its shard is killed: the answer goes on."""

import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from tests.support.processes import Service, children_of

KILL_AFTER_CHARS = 260  # of the answer
POLL_S = 0.02
CLIENT = ["tgis", "client", "stream", "--max-new-tokens", "150", "Once upon a time, a cat"]
PORTS = ["--bind", "127.0.0.1", "--port", "0", "--grpc-port", "0"]


@dataclass(frozen=True)
class Output:
    """Text that a process printed, so many seconds after the client's start."""

    at_s: float
    text: str


@dataclass
class Recording:
    answer: list[Output] = field(default_factory=list)
    log: list[Output] = field(default_factory=list)
    """Lines of the service from the kill on."""
    killed_at_s: float = 0.0
    killed_pid: int = 0

    @property
    def text(self) -> str:
        return "".join(each.text for each in self.answer)

    @property
    def pause(self) -> tuple[float, float]:
        """Begin and end of the longest time without text after the kill; text in flight may precede it."""
        times = [self.killed_at_s, *(each.at_s for each in self.answer if each.at_s > self.killed_at_s)]
        return max(pairwise(times), key=lambda both: both[1] - both[0])


def record(model: Path, directory: Path) -> Recording:
    """Return the recording of one answer. Ends the program if the kill changes the answer."""
    log = ["--termination-log", str(directory / "termination-log")]
    service = Service(["launcher", "--model-name", str(model), *PORTS, *log]).wait_until_serving()
    try:
        undisturbed = _ask(service, Recording(), kill=False)
        recording = _ask(service, Recording(), kill=True)
    finally:
        service.end()
    if recording.text != undisturbed.text:
        raise SystemExit(f"the answers differ: {undisturbed.text!r} and {recording.text!r}")
    return recording


def command() -> str:
    """Return the client's command as a user types it; the recording names the port of its service too."""
    return shlex.join(CLIENT)


def _ask(service: Service, recording: Recording, kill: bool) -> Recording:
    began = time.monotonic()
    target = ["--target", f"127.0.0.1:{service.grpc_port}"]
    client = subprocess.Popen([sys.executable, "-m", *CLIENT, *target], stdout=subprocess.PIPE)
    is_over = threading.Event()
    num_lines = len(service.lines)
    watch = threading.Thread(target=_watch_log, args=(service, num_lines, began, recording, is_over))
    watch.start()
    assert client.stdout is not None
    while text := os.read(client.stdout.fileno(), 1 << 16).decode():
        recording.answer.append(Output(time.monotonic() - began, text))
        if kill and not recording.killed_pid and len(recording.text) > KILL_AFTER_CHARS:
            recording.killed_pid = children_of(service.process.pid)["serve"][0]
            os.kill(recording.killed_pid, signal.SIGKILL)
            recording.killed_at_s = time.monotonic() - began
    is_over.set()
    watch.join()
    if client.wait():
        raise SystemExit("the client failed")
    return recording


def _watch_log(
    service: Service, num_lines: int, began: float, recording: Recording, is_over: threading.Event
) -> None:
    while not is_over.wait(POLL_S):
        for line in service.lines[num_lines:]:
            recording.log.append(Output(time.monotonic() - began, line))
            num_lines += 1
