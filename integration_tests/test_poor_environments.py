"""Services that start where things are missing: a home, a directory for temporary files, a user's name,
shared memory, file descriptors. They serve the same text."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from integration_tests.support.greedy_answers import Model
from integration_tests.support.service import Client
from integration_tests.support.steady_client import API, ask
from tests.support.processes import Service
from tests.support.router.messages import batch
from tgis.pb import generation_pb2 as pb

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

UNKNOWN_USER = "54321"
# The user may read the files of root, such as Python's own, and nothing else.
READS_ALL = ("--inh-caps", "+dac_read_search", "--ambient-caps", "+dac_read_search")
AS_UNKNOWN = ("setpriv", "--reuid", UNKNOWN_USER, "--regid", UNKNOWN_USER, "--clear-groups", *READS_ALL)
RUN = 'exec "$0" "$@"'
ENVIRONMENTS: dict[str, tuple[str, ...]] = {
    "usual": (),
    "a poor shell": (
        *("env", "-u", "HOME", "-u", "XDG_CACHE_HOME", "LC_ALL=C", "LANG=C", "PYTHONUTF8=0"),
        *("TMPDIR=/missing", "sh", "-c", f"umask 077; exec <&-; {RUN}"),
    ),
    "64 open files": ("sh", "-c", f"ulimit -n 64; {RUN}"),
    "a user without a name": ("env", "-u", "HOME", *AS_UNKNOWN),
    "shared memory that is read-only": (
        *("unshare", "-m", "sh", "-c"),
        f"mount -t tmpfs -o ro none /dev/shm && {RUN}",
    ),
    "no shared memory": ("unshare", "-m", "sh", "-c", f"umount -l /dev/shm && {RUN}"),
    "a machine whose name has no address": (
        *("unshare", "-u", "sh", "-c"),
        f"hostname no-such-host.invalid && {RUN}",
    ),
}


def can_run(command: tuple[str, ...]) -> bool:
    for name in {"setpriv", "unshare"}.intersection(command):
        if os.geteuid() or not shutil.which(name):
            return False
    return not subprocess.run([*command, "true"], check=False, capture_output=True).returncode


@contextmanager
def serving(model: Model, name: str) -> Iterator[Client]:
    command = ["launcher", "--model-name", str(model.directory), "--bind", "127.0.0.1", "--port", "0"]
    command += ["--grpc-port", "0", "--dtype", "float32", "--num-shard", "2", *API]
    service = Service(command, python=(*ENVIRONMENTS[name], sys.executable))
    client = Client(service.wait_until_serving())
    try:
        yield client
    finally:
        client.channel.close()
        code = service.end()
    assert code == 0, service.output
    assert "Traceback" not in service.output


@pytest.fixture(scope="module")
def usual_text(model: Model) -> str:
    with serving(model, "usual") as client:
        return ask(client.service.http)


@pytest.mark.parametrize("name", [*ENVIRONMENTS][1:])
def test_the_text_is_the_usual_one(model: Model, usual_text: str, name: str) -> None:
    """Also a request that needs another process, which compiles its constraint."""
    if not can_run(ENVIRONMENTS[name]):
        pytest.skip("only root can make this environment, and not in every container")
    with serving(model, name) as client:
        assert ask(client.service.http) == usual_text
        guided = client.stub.Generate(batch("a", decoding=pb.DecodingParameters(regex="b")), timeout=60)
        assert guided.responses[0].text == "b"
