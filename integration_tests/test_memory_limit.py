"""Processes that the kernel kills because their control group is out of memory."""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from integration_tests.support.greedy_answers import Model
from integration_tests.support.live_streams import read
from integration_tests.support.service import Client, launch
from integration_tests.support.steady_client import API, NUM_TOKENS, ask
from integration_tests.support.tuned_files import LINEAR, write_adapter
from tests.support.http_exchange import exchange
from tests.support.processes import Service, children_of
from tgis.pb import generation_pb2 as pb

pytestmark = pytest.mark.slow

ROOT = Path("/sys/fs/cgroup")
LIMIT = 2 << 20
LIMITS = {"memory.limit_in_bytes": "rss", "memory.max": "anon"}
"""File with the limit in each version, and the entry of memory.stat with the memory that cannot be freed."""
MARGIN = 4 << 20
NUM_ASKING, ASK_S = 8, 20.0
GROUP = f"tgis-test-{os.getpid()}"


def make_group() -> Path | None:
    """Create a control group of LIMIT, in version 1 or 2; None if that is not possible."""
    own = dict(line.split(":")[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
    for directory, limit in (
        (ROOT / "memory" / own.get("memory", "").lstrip("/"), "memory.limit_in_bytes"),
        (ROOT / own.get("", "").lstrip("/"), "memory.max"),
    ):
        try:
            (directory / GROUP).mkdir()
        except OSError:
            continue
        try:
            (directory / GROUP / limit).write_text(str(LIMIT))
        except OSError:
            (directory / GROUP).rmdir()
            continue
        return directory / GROUP
    return None


@pytest.fixture
def group() -> Iterator[Path]:
    group = make_group()
    if group is None:
        pytest.skip("no control group for memory can be made here")
    yield group
    for pid in (group / "cgroup.procs").read_text().split():
        os.kill(int(pid), signal.SIGKILL)
    group.rmdir()


def test_streams_go_on(model: Model, group: Path, tmp_path: Path) -> None:
    """The request that exceeded the memory completes too."""
    write_adapter(tmp_path / "large", model.directory, 3, LINEAR, r=1500)
    flags = ["--dtype", "float32", "--adapter-cache", str(tmp_path)]
    service = launch(model.directory, *flags, "--failpoints", "router.before_step=sleep:0.02")
    client = Client(service.wait_until_serving())
    texts = [expected.prompt[:20] for expected in model.expected[:8]]
    [shard] = children_of(service.process.pid)["serve"]
    with ThreadPoolExecutor(len(texts)) as threads:
        undisturbed = list(threads.map(lambda text: read(client, text), texts))
        (group / "cgroup.procs").write_text(str(shard))
        running = threading.Barrier(len(texts) + 1)
        streams = [threads.submit(read, client, text, running) for text in texts]
        running.wait(30)
        message = pb.BatchedGenerationRequest(requests=[pb.GenerationRequest(text="a")], adapter_id="large")
        assert client.stub.Generate(message, timeout=120).responses[0].generated_token_count == 20
        assert [stream.result(120) for stream in streams] == undisturbed
    reason = "shard 0 was killed by SIGKILL (out of memory?); restarting the shards"
    assert reason in service.output
    client.channel.close()
    assert service.end() == 0


def limit_soon(group: Path) -> None:
    """Set the limit just above what the group uses."""
    [(file, entry)] = [(group / name, entry) for name, entry in LIMITS.items() if (group / name).exists()]
    usage = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    file.write_text(str(int(usage[entry]) + MARGIN))


def ask_repeatedly(service: Service, deadline: float, statuses: set[int], texts: set[str]) -> None:
    request = {"prompt": "once upon a time", "max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0}
    while service.process.poll() is None and time.monotonic() < deadline:
        try:
            reply = exchange(f"{service.http}/v1/completions", request, timeout=200)
        except OSError:  # the service ends
            continue
        statuses.add(reply.status)
        if reply.status == 200:
            texts.add(reply.json["choices"][0]["text"])


@pytest.mark.timeout(400)
def test_a_service_with_hardly_any_memory_left(model: Model, group: Path) -> None:
    """The memory of the whole service is limited to little more than it uses, while requests come, one of
    which needs another process. The shard is lost and starts again, if there is room for its start; else the
    service ends with the reason."""
    [file] = [group / name for name in LIMITS if (group / name).exists()]
    file.write_text(str(4 << 30))
    command = ["launcher", "--model-name", str(model.directory), "--bind", "127.0.0.1", "--port", "0"]
    command += ["--grpc-port", "0", "--dtype", "float32", *API]
    inside = ("sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$0" "$@"', sys.executable)
    service = Service(command, python=inside).wait_until_serving()
    usual, statuses, texts = ask(service.http), set[int](), set[str]()
    limit_soon(group)
    deadline = time.monotonic() + ASK_S
    with ThreadPoolExecutor(NUM_ASKING) as threads:
        asking = [
            threads.submit(ask_repeatedly, service, deadline, statuses, texts) for _ in range(NUM_ASKING)
        ]
        guided = {"prompt": "a", "max_tokens": 4, "guided_regex": "[a-z]{4}"}
        statuses.add(exchange(f"{service.http}/v1/completions", guided, timeout=200).status)
        for each in asking:
            each.result(300)
    has_ended = service.process.poll() is not None
    assert service.end() == int(has_ended), service.output
    assert statuses <= {200, 503}
    assert texts <= {usual}
    assert "shard 0 was killed by SIGKILL (out of memory?); restarting the shards" in service.output
    assert "Traceback" not in service.output
