"""A shard that the kernel kills because its control group is out of memory."""

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from integration_tests.support.greedy_answers import Model
from integration_tests.support.live_streams import read
from integration_tests.support.service import Client, launch
from integration_tests.support.tuned_files import LINEAR, write_adapter
from tests.support.processes import children_of
from tgis.pb import generation_pb2 as pb

pytestmark = pytest.mark.slow

ROOT = Path("/sys/fs/cgroup")
LIMIT = 2 << 20
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
