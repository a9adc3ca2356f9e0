"""Lines of the log while nothing reads them, and afterwards."""

import fcntl
import io
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tgis import log_output
from tgis.log_output import LogOutput

PIPE_BYTES = 4096
TIMEOUT_S = 20


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """Reader's and writer's end of a small pipe."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    yield reader, writer
    os.close(writer)
    os.close(reader)


def write(output: LogOutput, lines: list[str]) -> None:
    """Write in another thread, and fail if it waits for the reader."""

    def run() -> None:
        stream = io.TextIOWrapper(output, "utf-8", line_buffering=True)
        for line in lines:
            stream.write(line + "\n")
        stream.detach()

    writer = threading.Thread(target=run, daemon=True)
    writer.start()
    writer.join(TIMEOUT_S)
    assert not writer.is_alive()


def read_until(reader: int, last: str) -> list[str]:
    """Return the lines up to the one that ends with `last`."""
    with open(os.dup(reader), encoding="utf-8") as stream:
        lines = []
        for line in stream:
            lines.append(line.rstrip("\n"))
            if lines[-1].endswith(last):
                break
        return lines


def read_bytes(reader: int, num_bytes: int) -> None:
    while num_bytes:
        num_bytes -= len(os.read(reader, num_bytes))


class SlowHandler(logging.Handler):
    """Handler that writes each record to `output`, some time after its arrival."""

    def __init__(self, output: LogOutput) -> None:
        super().__init__()
        self._output = output

    def emit(self, record: logging.LogRecord) -> None:
        time.sleep(0.2)
        self._output.write(record.getMessage().encode() + b"\n")


def lines_of(num: int, length: int) -> list[str]:
    return [f"{i:0{length}}" for i in range(num)]


@pytest.mark.parametrize("length", [100, PIPE_BYTES, 3 * PIPE_BYTES + 1])
def test_lines_that_wait_are_written_in_order(pipe: tuple[int, int], length: int) -> None:
    lines = lines_of(log_output.MAX_WAITING_BYTES // length // 2, length)
    output = LogOutput(pipe[1])
    write(output, lines)
    assert read_until(pipe[0], lines[-1]) == lines
    write(output, ["again"])
    assert read_until(pipe[0], "again") == ["again"]


def test_lines_beyond_the_limit_are_omitted_and_counted(
    pipe: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    lines = lines_of(4 * log_output.MAX_WAITING_BYTES // 1000, 1000)
    output = LogOutput(pipe[1])
    write(output, lines)
    assert output.is_full
    handler = logging.StreamHandler(io.TextIOWrapper(output, "utf-8", line_buffering=True))
    logging.getLogger("tgis.log_output").addHandler(handler)
    try:
        *first, report = read_until(pipe[0], "stderr was not read")
    finally:
        logging.getLogger("tgis.log_output").removeHandler(handler)
        with handler.lock:  # the thread that writes the report may still use the stream
            handler.stream.detach()
    assert first == lines[: len(first)]
    assert report.startswith(f"{len(lines) - len(first)} lines of the log were omitted")
    assert len("".join(first)) > log_output.MAX_WAITING_BYTES


def test_a_wait_ends_when_all_is_written_or_its_time_is_over(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_output, "MAX_WAIT_S", 0.2)
    output = LogOutput(pipe[1])
    lines = lines_of(20, 1000)
    write(output, lines)
    output.wait()
    assert output._waiting
    assert read_until(pipe[0], lines[-1]) == lines
    output.wait()
    assert not output._waiting


def test_all_is_written_after_a_wait(pipe: tuple[int, int]) -> None:
    """Also if text was being written when the wait began."""
    output = LogOutput(pipe[1])
    text = bytes(50 * PIPE_BYTES)
    for _ in range(20):
        output.write(text)
        reader = threading.Thread(target=read_bytes, args=(pipe[0], len(text)))
        reader.start()
        output.wait()
        waiting = output._num_waiting_bytes
        reader.join(TIMEOUT_S)
        assert waiting == 0


def test_the_number_of_omitted_lines_is_written_after_a_wait(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if that line of the log takes some time."""
    monkeypatch.setattr(log_output, "MAX_WAITING_BYTES", 1)
    output = LogOutput(pipe[1])
    handler = SlowHandler(output)
    log_output.logger.addHandler(handler)
    try:
        text = bytes(2 * PIPE_BYTES)
        output.write(text)
        output.write(b"omitted\n")
        reader = threading.Thread(target=read_bytes, args=(pipe[0], len(text)))
        reader.start()
        output.wait()
        reader.join(TIMEOUT_S)
    finally:
        log_output.logger.removeHandler(handler)
    os.set_blocking(pipe[0], False)
    assert os.read(pipe[0], 100) == b"1 lines of the log were omitted, because stderr was not read\n"


def test_a_wait_outlasts_a_stall(pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_output, "STALLED_S", 0.1)
    monkeypatch.setattr(log_output, "MAX_WAIT_S", TIMEOUT_S)
    output = LogOutput(pipe[1])
    lines = lines_of(20, 1000)
    write(output, lines)
    wait = threading.Thread(target=output.wait)
    wait.start()
    wait.join(0.5)
    assert wait.is_alive()
    assert output.is_stalled
    assert read_until(pipe[0], lines[-1]) == lines
    wait.join()
    assert not output.is_stalled


def test_a_reader_that_is_gone_stops_nothing() -> None:
    reader, writer = os.pipe()
    output = LogOutput(writer)
    os.close(reader)
    write(output, lines_of(100, 1000))
    output.wait()
    assert not output.is_full
    os.close(writer)


INSTALL = """
import os, sys
from tgis import log_output
log_output.install()
print("unread", file=sys.stderr)
files = [os.readlink(f"/proc/self/fd/{fd}") for fd in range(3)]
open(sys.argv[1], "w").write(f"{files} {log_output.installed() is not None}")
"""


@pytest.mark.parametrize("closed", ["2>&-", "0<&- 1>&- 2>&-"])
def test_closed_standard_files_are_replaced(tmp_path: Path, closed: str) -> None:
    """No socket that is opened later gets their numbers."""
    result = tmp_path / "result"
    command = ["bash", "-c", f'exec "$@" {closed}', "bash", sys.executable, "-c", INSTALL, str(result)]
    subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=True)
    assert result.read_text() == f"{['/dev/null'] * 3} True"
