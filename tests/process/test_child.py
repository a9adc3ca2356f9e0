"""A child that prints without end, and a parent whose output is not read: neither blocks the other. A child
that cannot be started or stops while it loads, and children of a process in which gRPC has threads."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.support.processes import children_of
from tests.support.shard.checkpoints import write_llama
from tgis import log_output
from tgis.process import heartbeat
from tgis.process.child import Child

FLOOD_BYTES = 100_000_000
IS_READ = "is_read"
# Replaces the package of a child. Its writes are buffered, because an interrupted write may be incomplete.
# It ends when a file says that its output has been read, because a full log omits the last lines of a child
# that has ended.
FLOOD = f"""
import os, time
line = (b"x" * 9999 + b"\\n") * 100
with open(2, "wb", closefd=False) as stderr, open(1, "wb", closefd=False) as stdout:
    for _ in range({FLOOD_BYTES} // 2 // len(line)):
        stderr.write(line)
    stderr.flush()
    for _ in range({FLOOD_BYTES} // 2 // len(line)):
        stdout.write(b"y" * len(line))
    stdout.write(b"\\n")
until = time.monotonic() + 60
while not os.path.exists("{IS_READ}") and time.monotonic() < until:
    time.sleep(0.01)
os.write(2, b"\\nerror: the flood is over")
os._exit(1)
"""
PARENT = """
import asyncio, sys
from pathlib import Path
from tgis import log_output
from tgis.process.child import Child
from tgis.process.output_lines import LineForm

async def run():
    child, beats = Child("flood", [], LineForm("Flood: ", eval(sys.argv[2]))), 0
    await child.start()
    end = asyncio.ensure_future(child.wait())
    while not end.done():
        await asyncio.sleep(0.01)
        beats += 1
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line)
    Path(sys.argv[1]).write_text(f"{end.result().text}|{beats}|{peak.split()[1]}")

log_output.STALLED_S = float(sys.argv[3])
log_output.MAX_WAIT_S = max(log_output.MAX_WAIT_S, log_output.STALLED_S)
log_output.install()
asyncio.run(run())
"""
STALLED_S = str(log_output.STALLED_S)
READING_STALLED_S = 60.0
"""For a test that reads all the time, although a busy machine may stop it for seconds."""
# Starts children during calls from its own channels to its own server.
GRPC_PARENT = """
import asyncio, sys, threading
from concurrent.futures import ThreadPoolExecutor

import grpc
from tgis.process.child import Child

class Echo(grpc.GenericRpcHandler):
    def service(self, details):
        return grpc.unary_unary_rpc_method_handler(lambda request, context: request)

server = grpc.server(ThreadPoolExecutor(2), [Echo()])
port = server.add_insecure_port("127.0.0.1:0")
server.start()
OWN_CONNECTION = [("grpc.use_local_subchannel_pool", 1)]
failures, is_over = [], threading.Event()

def call():
    while not is_over.is_set():
        try:
            with grpc.insecure_channel(f"127.0.0.1:{port}", OWN_CONNECTION) as channel:
                for _ in range(20):
                    channel.unary_unary("/echo/echo")(b"x")
        except grpc.RpcError as error:
            failures.append(error.details())

async def run():
    child = Child("child", [])
    await child.start()
    return (await child.wait()).text

caller = threading.Thread(target=call)
caller.start()
print({asyncio.run(run()) for _ in range(60)}, failures)
is_over.set()
caller.join()
"""


@pytest.fixture
def parent(tmp_path: Path) -> list[str]:
    """Print the end of its child, the number of iterations meanwhile, and its peak memory in KiB."""
    (tmp_path / "tgis").mkdir()
    (tmp_path / "tgis" / "__init__.py").touch()
    (tmp_path / "tgis" / "__main__.py").write_text(FLOOD)
    (tmp_path / IS_READ).touch()
    import_ours = f"import sys; sys.path.insert(0, {str(Path.cwd())!r})"
    return [sys.executable, "-c", import_ours + PARENT, str(tmp_path / "result")]


def check(result: Path) -> None:
    end, beats, kib = result.read_text().split("|")
    assert end == "flood: the flood is over"
    assert int(beats) > 10
    assert int(kib) < 80 << 10


FIELDS = [None, {"process": "flood"}]


@pytest.mark.parametrize("fields", FIELDS)
def test_a_flood_passes(parent: list[str], tmp_path: Path, fields: dict[str, str] | None) -> None:
    num_bytes = 0
    (tmp_path / IS_READ).unlink()
    command = [*parent, repr(fields), str(READING_STALLED_S)]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE) as run:
        assert run.stderr is not None
        for line in run.stderr:
            num_bytes += len(line)
            if num_bytes >= FLOOD_BYTES:
                (tmp_path / IS_READ).touch()
            if fields:
                entry = json.loads(line)
                assert entry["process"] == "flood"
                assert set(entry["message"]) <= {"x", "y"}
            else:
                assert line.startswith(b"Flood: ")
    check(tmp_path / "result")
    assert num_bytes >= FLOOD_BYTES


@pytest.mark.parametrize("fields", FIELDS)
def test_unread_output_does_not_block(
    parent: list[str], tmp_path: Path, fields: dict[str, str] | None
) -> None:
    reader, writer = os.pipe()
    run = subprocess.Popen([*parent, repr(fields), STALLED_S], cwd=tmp_path, stdout=writer, stderr=writer)
    os.close(reader)
    os.close(writer)
    assert run.wait(60) == 0
    check(tmp_path / "result")


def test_a_reader_that_stalls_does_not_block(parent: list[str], tmp_path: Path) -> None:
    with subprocess.Popen([*parent, "None", STALLED_S], cwd=tmp_path, stderr=subprocess.PIPE) as run:
        assert run.wait(60) == 0
        assert run.stderr is not None
        assert run.stderr.read(1)
    check(tmp_path / "result")


@pytest.mark.slow
def test_the_end_of_a_child_is_noticed_while_its_output_is_read_slowly(
    parent: list[str], tmp_path: Path
) -> None:
    with subprocess.Popen(
        [*parent, "None", STALLED_S], cwd=tmp_path, stderr=subprocess.PIPE, bufsize=0
    ) as run:
        assert run.stderr is not None
        began = killed = time.monotonic()
        while run.stderr.read(4096):
            time.sleep(0.4)
            if killed == began and time.monotonic() > began + 3:
                [child] = psutil.Process(run.pid).children()
                child.kill()
                killed = time.monotonic()
        assert time.monotonic() < killed + log_output.MAX_WAIT_S + 20
    assert (tmp_path / "result").read_text().startswith("flood was killed by SIGKILL")


@pytest.mark.slow
def test_threads_of_grpc_harm_no_child_and_no_child_harms_them(tmp_path: Path) -> None:
    (tmp_path / "tgis").mkdir()
    (tmp_path / "tgis" / "__init__.py").touch()
    (tmp_path / "tgis" / "__main__.py").touch()
    import_ours = f"import sys; sys.path.insert(0, {str(Path.cwd())!r})"
    command = [sys.executable, "-c", import_ours + GRPC_PARENT]
    run = subprocess.run(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, check=False)
    assert run.stdout == "{'child exited with code 0'} []\n"


async def test_a_start_that_fails_leaves_no_descriptor_open() -> None:
    before = os.listdir("/proc/self/fd")
    for _ in range(3):
        with pytest.raises(ValueError, match="null byte"):
            await Child("nobody", ["\0"], has_heartbeat=True).start()
    assert len(os.listdir("/proc/self/fd")) <= len(before)


async def test_a_signal_reaches_a_child_that_is_just_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service that is stopped in this moment must not wait for its router until the limit of a drain."""
    (tmp_path / "tgis").mkdir()
    (tmp_path / "tgis" / "__init__.py").touch()
    (tmp_path / "tgis" / "__main__.py").write_text("import time; time.sleep(600)")
    monkeypatch.chdir(tmp_path)
    child = Child("child", [])
    starting = asyncio.create_task(child.start())
    await asyncio.sleep(0)
    child.signal(signal.SIGTERM)
    await starting
    try:
        assert (await asyncio.wait_for(child.wait(), 20)).text == "child was killed by SIGTERM"
    finally:
        await child.kill()


async def test_a_shard_that_stops_while_it_loads_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_begun, read = asyncio.Event(), os.read

    def watch(fd: int, size: int) -> bytes:
        content = read(fd, size)
        if content and not content.strip(b"-"):
            has_begun.set()
        return content

    monkeypatch.setattr(os, "read", watch)
    monkeypatch.setattr(heartbeat, "PERIOD_S", 0.05)  # of the parent; the child has its usual one
    monkeypatch.setattr(heartbeat, "MAX_MISSED_LOADING", 10**6)  # until its heartbeats begin
    write_llama(tmp_path)
    slow = ["--failpoints", "shard.before_loading=sleep:600"]
    child = Child("shard 0", ["serve", "--model-path", str(tmp_path), *slow], has_heartbeat=True)
    await child.start()
    waiting = asyncio.create_task(child.wait())
    await asyncio.wait_for(has_begun.wait(), 120)
    monkeypatch.setattr(heartbeat, "MAX_MISSED_LOADING", 80)
    done, _ = await asyncio.wait([waiting], timeout=6)
    assert not done, f"a shard that loads for longer than the allowed silence: {waiting.result()}"
    [pid] = children_of(os.getpid())["serve"]
    os.kill(pid, signal.SIGSTOP)
    end = await asyncio.wait_for(waiting, 60)
    assert (end.text, child.loaded.is_set()) == ("shard 0 hung and was killed", False)
