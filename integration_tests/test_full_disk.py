"""A full disk: requests that need space are refused with a reason, all others are served."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from integration_tests.support.greedy_answers import Model
from integration_tests.support.service import Client
from integration_tests.support.steady_client import API, steady_client
from integration_tests.support.tuned_files import LINEAR, SoftPrompt, embeddings, write_adapter, write_prompt
from tests.support.processes import Service, children_of
from tgis.pb import generation_pb2 as pb

TINY_DISK = [
    "unshare",
    "--mount",
    "sh",
    "-c",
    'mount -t tmpfs -o size=$1 tmpfs "$TMPDIR" && shift && exec "$@"',
    "sh",
]


def python_on(size: str) -> list[str]:
    return [*TINY_DISK, size, sys.executable]


@pytest.fixture
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory in which a command of `python_on` has this much space for its temporary files."""
    directory = tmp_path_factory.mktemp("disk")  # a path that is short enough for sockets
    env = {**os.environ, "TMPDIR": str(directory)}
    if subprocess.run([*python_on("1m"), "-c", ""], env=env, capture_output=True, timeout=30).returncode:
        pytest.skip("no small disk can be made here: that needs root, and unshare")
    return directory


@pytest.fixture
def client(model: Model, disk: Path) -> Iterator[Client]:
    store = disk.with_name(f"{disk.name}-store")
    write_prompt(store / "eight", SoftPrompt(embeddings(8, 1)))
    write_adapter(store / "large", model.directory, 3, LINEAR, r=400)
    command = ["launcher", "--model-name", str(model.directory), "--prefix-store-path", str(store)]
    command += ["--bind", "127.0.0.1", "--port", "0", "--grpc-port", "0", *API]
    service = Service(command, {"TMPDIR": str(disk)}, python=python_on("1m")).wait_until_serving()
    client = Client(service)
    try:
        yield client
    finally:
        client.channel.close()
        code = service.end()
        shutil.rmtree(store)
    assert code == 0, service.output


def generate(client: Client, **ids: str) -> str:
    message = pb.BatchedGenerationRequest(requests=[pb.GenerationRequest(text="girl")], **ids)
    return client.stub.Generate(message, timeout=60).responses[0].text


def fill(directory: Path) -> None:
    """Fill the disk to the last byte."""
    with contextlib.suppress(OSError), (directory / "filling").open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass


def refusal(client: Client, **ids: str) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        generate(client, **ids)
    return caught.value.code(), caught.value.details()


@pytest.mark.slow
def test_requests_without_disk_access_are_served(client: Client, disk: Path) -> None:
    """Also by a restarted shard, which has lost its loaded adapters. A steady client loses nothing."""
    with steady_client(client.service.http):
        check_full_disk(client, disk)


def check_full_disk(client: Client, disk: Path) -> None:
    service, full = client.service, grpc.StatusCode.RESOURCE_EXHAUSTED
    plain, tuned = generate(client), generate(client, prefix_id="eight")
    text = "can't retrieve {} with id '{}': no room is left for a copy"
    fill(Path(f"/proc/{service.process.pid}/root") / disk.relative_to("/"))
    assert (generate(client), generate(client, prefix_id="eight")) == (plain, tuned)
    assert refusal(client, adapter_id="large") == (full, text.format("adapter", "large"))
    assert "no space is left for copies of soft prompts and adapters" in service.output
    os.kill(children_of(service.process.pid)["serve"][0], signal.SIGKILL)
    service.wait_for_line("the shards are back")
    assert generate(client) == plain
    assert refusal(client, prefix_id="eight") == (full, text.format("prompt prefix", "eight"))
