"""The service as the systemd unit starts and ends it: its command, variables, limits and filter of system
calls, with two shards."""

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from integration_tests.deployment.systemd.sandbox import missing_tools
from integration_tests.deployment.systemd.units import read_unit
from tests.support.processes import Service, children_of
from tests.support.shard.checkpoints import write_llama
from tests.support.tokenizers.trained import write_byte_level
from tgis.pb import generation_pb2 as pb
from tgis.pb.generation_pb2_grpc import GenerationServiceStub

pytestmark = pytest.mark.deploy

DIRECTORY = Path("deployment/systemd").absolute()
UNIT = DIRECTORY / "tgis-next.service"
SANDBOX = "integration_tests.deployment.systemd.sandbox"
LENGTH = 300


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if missing := missing_tools():
        pytest.skip(f"{missing} is missing: the unit is not run")
    model = tmp_path_factory.mktemp("models") / "tiny"
    write_llama(model, vocab_size=403, max_position_embeddings=512, eos_token_id=1)
    write_byte_level(model, 400)
    return model


def start(unit: Path, model: Path, home: Path) -> Service:
    """Return the command with other paths than the unit's, and free ports."""
    said = read_unit(unit.read_text(), (DIRECTORY / "tgis-next.env").read_text())
    program = shutil.which(Path(said.command[0]).name, path=str(Path(sys.executable).parent))
    assert program is not None
    here = {"HOME": str(home), "TMPDIR": str(home), "BIND": "127.0.0.1", "PORT": "0", "GRPC_PORT": "0"}
    here |= {"MODEL_NAME": str(model), "NUM_SHARD": "2"}
    return Service([str(unit), program, *said.command[1:]], said.environment | here, SANDBOX)


def request() -> pb.SingleGenerationRequest:
    stopping = pb.StoppingCriteria(max_new_tokens=LENGTH, min_new_tokens=LENGTH)
    params = pb.Parameters(stopping=stopping)
    return pb.SingleGenerationRequest(request=pb.GenerationRequest(text="a"), params=params)


@pytest.fixture
def home() -> Iterator[Path]:
    """Create a directory with a short path, because pytest's may be too long for a socket."""
    with tempfile.TemporaryDirectory(prefix="unit-") as directory:
        yield Path(directory)


@pytest.fixture
def service(model: Path, home: Path) -> Iterator[Service]:
    service = start(UNIT, model, home)
    yield service.wait_until_serving()
    service.end()


def test_it_serves_and_ends_as_systemd_ends_it(service: Service) -> None:
    """A signal to the launcher is enough; the running stream completes, and no process remains."""
    launcher = service.process.pid
    limits = Path(f"/proc/{launcher}/limits").read_text()
    assert "Max open files            8192                 8192" in limits
    assert "Seccomp:\t2" in Path(f"/proc/{launcher}/status").read_text()
    processes = [launcher, *(pid for pids in children_of(launcher).values() for pid in pids)]
    assert len(processes) == 4, "the launcher, a router and two shards"
    with service.channel() as channel:
        stream = GenerationServiceStub(channel).GenerateStream(request())
        next(stream)
        service.process.terminate()
        *_, last = stream
    assert (last.generated_token_count, last.stop_reason) == (LENGTH, pb.MAX_TOKENS)
    assert service.process.wait(30) == 0, service.output
    assert not [pid for pid in processes if Path(f"/proc/{pid}").exists()]


def test_a_router_s_death_is_a_failure_that_systemd_restarts(service: Service) -> None:
    [router] = children_of(service.process.pid)["router"]
    with service.channel() as channel:
        stream = GenerationServiceStub(channel).GenerateStream(request())
        next(stream)
        os.kill(router, signal.SIGKILL)
        with pytest.raises(grpc.RpcError) as torn:
            list(stream)
    assert torn.value.code() is grpc.StatusCode.UNAVAILABLE
    assert service.process.wait(30) == 1
    assert any("router was killed by SIGKILL" in line for line in service.lines)


def test_shards_cannot_meet_without_netlink(model: Path, home: Path) -> None:
    """The sandbox detects calls that the unit's filter refuses."""
    unit = home / UNIT.name
    unit.write_text(UNIT.read_text().replace(" AF_NETLINK", ""))
    service = start(unit, model, home)
    assert service.process.wait(60) == 1
    assert service.end() == 1
    assert any("could not connect to all 2 ranks" in line for line in service.lines)


def test_options_that_cannot_be_read_are_not_tried_again(model: Path, home: Path) -> None:
    unit = home / UNIT.name
    text = UNIT.read_text()
    unit.write_text(text.replace("text-generation-launcher\n", "text-generation-launcher --modell x\n"))
    service = start(unit, model, home)
    assert str(service.process.wait(30)) == read_unit(text, "").last("RestartPreventExitStatus")
    service.end()
