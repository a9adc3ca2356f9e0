"""Deaths of processes, disconnecting clients and failing starts, with real processes."""

import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path

import grpc
import pytest
import torch
from safetensors.torch import load_file

from integration_tests.support.greedy_answers import Model
from integration_tests.support.live_streams import NUM_STREAMS, check_survival, long_request, read
from integration_tests.support.service import Client, launch, serve
from tests.support.accounts import assert_nothing_left, take_baseline
from tests.support.processes import Service, children_of
from tests.support.prompt_files import Payload
from tgis.launcher.main import REPEATED_S
from tgis.net.ports import IN_USE
from tgis.pb import generation_pb2 as pb
from tgis.router.shards.client import LOST

LOOPBACK = {
    "0100007F",
    "0000000000000000FFFF00000100007F",
    "00000000000000000000000001000000",
}  # format of /proc/net


@pytest.fixture(scope="module")
def client(model: Model) -> Iterator[Client]:
    yield from serve(model.directory, "--dtype", "float32", "--num-shard", "2")


@pytest.mark.slow  # chaos does the same
@pytest.mark.parametrize("victim", [0, 1])
def test_streams_survive_a_killed_shard(client: Client, model: Model, victim: int) -> None:
    assert len(children_of(client.service.process.pid)["serve"]) == 2
    check_survival(client, [expected.prompt[:20] for expected in model.expected[:NUM_STREAMS]], victim)


@pytest.mark.slow
def test_a_hundred_cancelled_streams_leave_nothing(client: Client, model: Model) -> None:
    read(client, "a")
    baseline = take_baseline(client.service.http)

    def cancel(i: int) -> None:
        call = client.stub.GenerateStream(long_request(model.expected[i % 20].prompt))
        for _ in range(i % 13):
            next(call)
        call.cancel()

    with ThreadPoolExecutor(32) as threads:
        list(threads.map(cancel, range(100)))
    assert_nothing_left(client.service.http, baseline)


def test_nothing_listens_off_loopback(client: Client) -> None:
    """Public ports are bound to loopback here; gloo's sockets must always be."""
    own = sockets_of(children_of(client.service.process.pid))
    listening = {address for address, inode in listening_inodes() if inode in own}
    assert listening
    assert listening <= LOOPBACK, listening


def listening_inodes() -> set[tuple[str, str]]:
    inodes = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                inodes.add((fields[1].rsplit(":", 1)[0], fields[9]))
    return inodes


def sockets_of(children: dict[str, list[int]]) -> set[str]:
    inodes = set()
    for pid in chain(*children.values()):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            if match := re.match(r"socket:\[(\d+)\]", os.readlink(entry)):
                inodes.add(match[1])
    assert inodes
    return inodes


@pytest.mark.slow
def test_sigterm_finishes_active_calls(model: Model) -> None:
    service = launch(model.directory, "--dtype", "float32").wait_until_serving()
    client = Client(service)
    with ThreadPoolExecutor(NUM_STREAMS) as threads:
        running = threading.Barrier(NUM_STREAMS + 1)
        streams = [threads.submit(read, client, "girl", running) for _ in range(NUM_STREAMS)]
        running.wait(30)
        started = time.monotonic()
        assert service.end(signal.SIGTERM) == 0, service.output
        assert time.monotonic() - started < 8
        assert {stream.result(10).stop_reason for stream in streams} == {pb.MAX_TOKENS}
    client.channel.close()


@pytest.mark.parametrize(
    ("is_killed", "workers", "num_children"),
    [
        (True, "1", 3),
        pytest.param(False, "1", 3, marks=pytest.mark.slow),
        pytest.param(True, "2", 5, marks=pytest.mark.slow),
        pytest.param(False, "2", 5, marks=pytest.mark.slow),
    ],
)
def test_nothing_outlives_the_launcher(
    model: Model, tmp_path: Path, is_killed: bool, workers: str, num_children: int
) -> None:
    """Neither a killed process nor one that gets a second signal while it drains leaves sockets."""
    log = tmp_path / "termination-log"
    slowly = ("--failpoints", "shard.before_forward=sleep:0.1")
    flags = ("--num-shard", "2", "--router-workers", workers, "--termination-log", str(log), *slowly)
    service = launch(model.directory, *flags).wait_until_serving()
    children = list(chain(*children_of(service.process.pid).values()))
    assert len(children) == num_children
    port, client = service.grpc_port, Client(service)
    stream = client.stub.GenerateStream(long_request("girl"))
    next(stream)
    next(stream)
    if is_killed:
        service.end(signal.SIGKILL)
    else:
        service.process.send_signal(signal.SIGINT)
        service.wait_for_line("draining requests: 1", 10)
        time.sleep(REPEATED_S)
        assert service.end(signal.SIGINT) == 1
        text = "a second signal ended the service at once"
        assert (service.lines[-1], log.read_text()) == (f"error: {text}", f"{text}\n")
    deadline = time.monotonic() + 30
    while any(is_running(pid) for pid in children) or not can_listen(port):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    with pytest.raises(grpc.RpcError) as ended:
        list(stream)
    assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
    client.channel.close()


@pytest.mark.slow
def test_shards_that_keep_dying_end_the_service(model: Model, tmp_path: Path) -> None:
    log = tmp_path / "termination-log"
    service = launch(model.directory, "--termination-log", str(log)).wait_until_serving()
    client = Client(service)
    stream = client.stub.GenerateStream(long_request("girl"))
    next(stream)
    next(stream)  # a token: the first message may arrive before the shards have computed anything
    killed: set[int] = set()
    deadline = time.monotonic() + 60
    while service.process.poll() is None:
        assert time.monotonic() < deadline, service.output
        for pid in set(children_of(service.process.pid).get("serve", [])) - killed:
            killed.add(pid)
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    assert service.end() == 1
    text = "shard 0 was killed by SIGKILL (out of memory?); giving up after 6 restarts of the shards"
    assert service.lines[-1] == f"error: {text}"
    assert log.read_text() == text + "\n"
    with pytest.raises(grpc.RpcError) as ended:
        list(stream)
    assert (ended.value.code(), ended.value.details()) == (grpc.StatusCode.UNAVAILABLE, LOST)
    client.channel.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_shards", "fault", "reason"),
    [
        (1, "shard.before_loading=kill", "shard 0 was killed by SIGKILL (out of memory?)"),
        (2, "shard.before_loading[rank=1]=exit", "shard 1 exited with code 3"),
    ],
)
def test_shards_that_die_before_they_serve_are_tried_four_times(
    model: Model, tmp_path: Path, num_shards: int, fault: str, reason: str
) -> None:
    log = tmp_path / "termination-log"
    flags = ("--num-shard", str(num_shards), "--termination-log", str(log))
    service = launch(model.directory, *flags, "--failpoints", fault)
    assert service.process.wait(90) == service.end() == 1
    text = f"{reason}; giving up after 3 restarts of the shards"
    assert (service.lines[-1], log.read_text()) == (f"error: {text}", f"{text}\n")
    assert service.output.count("restarting the shards") == 3


def can_listen(port: int) -> bool:
    """A dying process keeps its sockets until its last thread has ended."""
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def broken(model: Model, directory: Path, **config: object) -> str:
    """Create a copy of the model with another config.json."""
    shutil.copytree(model.directory, directory)
    settings = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(settings | config))
    return str(directory)


def processes_with(variable: str) -> set[str]:
    """Return the ids of all processes started with it, whatever their parent is now."""
    processes = set()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if variable.encode() in (entry / "environ").read_bytes().split(b"\0"):
                processes.add(entry.name)
    return processes


def failure(*flags: str, env: dict[str, str] | None = None, termination_log: Path | None = None) -> str:
    """Return the last line of a start that must fail quickly, even beside other tests, and leave no files."""
    log = ["--termination-log", str(termination_log)] if termination_log else []
    command = ["launcher", "--bind", "127.0.0.1", "--port", "0", "--grpc-port", "0", *log, *flags]
    mark = secrets.token_hex(8)
    service = Service(command, {"OF_TEST": mark, **(env or {})})
    code = service.process.wait(60)
    assert service.end() == code != 0
    assert not processes_with(f"OF_TEST={mark}")
    assert "Traceback" not in service.output
    return service.lines[-1]


@pytest.mark.slow
def test_starts_that_fail_say_why_in_one_line(model: Model, tmp_path: Path) -> None:
    log = tmp_path / "termination-log"

    def fails(*flags: str, **more: object) -> str:
        return failure(*flags, termination_log=log, **more)  # type: ignore[arg-type]

    here = ["--model-name", str(model.directory)]
    text = "Failed to resolve config path: Model nobody/nothing not found: it is neither a directory nor "
    assert fails("--model-name", "nobody/nothing").startswith(f"error: {text}")
    assert log.read_text().startswith(text)
    text = "dtype and dtype_str args both provided with different values"
    assert fails(*here, "--dtype", "float32", "--dtype-str", "float16") == f"error: {text}"
    text = "NUM_GPUS and num_shard are set to different values (2 and 1)"
    assert fails(*here, "--num-shard", "1", env={"NUM_GPUS": "2"}) == f"error: {text}"
    small = json.loads(fails(*here, "--kv-cache-tokens", "100", "--json-output"))["message"]
    assert small.startswith("error: shard 0: the cache is too small for one request")
    assert log.read_text() == small.removeprefix("error: ") + "\n"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        text = f"error: port {port} on 127.0.0.1 cannot be opened: Address already in use{IN_USE}"
        assert fails(*here, "--grpc-port", port) == text


@pytest.mark.slow
def test_weights_that_do_not_fit_or_are_cut_are_refused(model: Model, tmp_path: Path) -> None:
    log = tmp_path / "termination-log"
    unknown = broken(model, tmp_path / "unknown", model_type="foo")
    text = "model type 'foo' cannot be served through transformers: transformers does not know this type; "
    text += "docs/models.md lists the families that are served"
    assert failure("--model-name", unknown, termination_log=log) == f"error: shard 0: {text}"
    assert text in log.read_text()
    wrong = broken(model, tmp_path / "wrong", hidden_size=48)
    assert re.search(r"error: shard 0: .*model\.safetensors.*", failure("--model-name", wrong))
    fewer = broken(model, tmp_path / "fewer", num_hidden_layers=1)
    line = failure("--model-name", fewer, "--num-shard", "2", termination_log=log)
    text = rf"{re.escape(fewer)}: config\.json describes a model without \d+ of the checkpoint's tensors, .*"
    assert re.fullmatch(rf"error: shard \d: {text}", line)
    assert re.search(text, log.read_text())
    file = Path(broken(model, tmp_path / "cut")) / "model.safetensors"
    os.truncate(file, file.stat().st_size - 8)
    line = failure("--model-name", str(file.parent), termination_log=log)
    text = f"shard 0: {file} cannot be read: it is truncated or damaged: "
    assert line.startswith(f"error: {text}")
    assert text in log.read_text()


@pytest.mark.slow
def test_pickles_with_code_are_refused(model: Model, tmp_path: Path) -> None:
    directory, target = Path(broken(model, tmp_path / "pickles")), tmp_path / "made"
    tensors = load_file(directory / "model.safetensors")
    torch.save({**tensors, "payload": Payload(os.mkdir, str(target))}, directory / "pytorch_model.bin")
    (directory / "model.safetensors").unlink()
    line = failure("--model-name", str(directory))
    file = re.escape(f"{directory}/pytorch_model.bin")
    assert re.fullmatch(rf"error: shard 0: {file} calls posix\.mkdir, .*; it was not run", line)
    assert not target.exists()
