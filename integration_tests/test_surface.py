"""A service in its most restricted environment: it serves, and its listening sockets, its peers, the files it
opens, and the files it leaves are known."""

import os
import re
import shutil
import signal
import sys
import urllib.request
from collections.abc import Iterator
from ipaddress import ip_address
from itertools import chain
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub

from integration_tests.support.greedy_answers import Model, check, request
from integration_tests.support.hardened import AUDIT, FILES, GRPC_PORT, HTTP_PORT, USER_ID, Hardened, Watch
from integration_tests.support.tuned_files import LINEAR, SoftPrompt, embeddings, write_adapter, write_prompt
from tests.support.hostile_ids import HOSTILE, write_ways_out
from tests.support.processes import children_of
from tgis.pb import generation_pb2 as pb

TMP = Path("/tmp")
STORE = FILES / "root"
LOADED = re.compile(r"loaded in ([\d.]+) s")


@pytest.fixture(scope="module")
def files(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make it readable for everyone."""
    files = tmp_path_factory.mktemp("hardened") / "files"
    shutil.copytree(model.directory, files / "model")
    write_prompt(files / "root" / "eight", SoftPrompt(embeddings(8, 1)))
    write_adapter(files / "root" / "sql", files / "model", 3, LINEAR)
    write_ways_out(files / "root", files / "outside", FILES / "outside")
    let_all_read(files)
    return files


def let_all_read(directory: Path) -> None:
    for path in (directory, *directory.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() else 0o644)


@pytest.fixture(scope="module")
def place(files: Path) -> Iterator[Hardened]:
    store = ["--prefix-store-path", str(STORE), "--adapter-cache", str(STORE)]
    place = Hardened(files.parent, files, *store, size="128m")
    writable = os.open(place.root / "tmp", os.O_PATH)
    try:
        yield place
    finally:
        code, left = place.end(), os.listdir(f"/proc/self/fd/{writable}")
        os.close(writable)
    assert code == 0, place.service.output
    assert not [name for name in left if name.startswith("text-generation")]


def generate(place: Hardened, prefix_id: str = "", adapter_id: str = "") -> str:
    ids = {"prefix_id": prefix_id or None, "adapter_id": adapter_id or None}
    message = pb.BatchedGenerationRequest(requests=[pb.GenerationRequest(text="girl")], **ids)
    return place.client.stub.Generate(message, timeout=60).responses[0].text


def test_everything_is_served(place: Hardened, model: Model) -> None:
    stub, expected = place.client.stub, model.expected[0]
    parameters = pb.Parameters(**request(expected))
    prompt = pb.GenerationRequest(text=expected.prompt)
    message = pb.BatchedGenerationRequest(requests=[prompt], params=parameters)
    [answer] = stub.Generate(message, timeout=60).responses
    check(expected, answer)
    stream = stub.GenerateStream(pb.SingleGenerationRequest(request=prompt, params=parameters), timeout=60)
    assert "".join(part.text for part in stream) == answer.text
    tokens = stub.Tokenize(pb.BatchedTokenizeRequest(requests=[pb.TokenizeRequest(text=expected.prompt)]))
    assert tokens.responses[0].token_count == len(expected.input_pieces)
    assert stub.ModelInfo(pb.ModelInfoRequest()).max_sequence_length == 256
    health = HealthStub(place.client.channel).Check(health_pb2.HealthCheckRequest())
    assert health.status == health_pb2.HealthCheckResponse.SERVING
    for path, text in (("health", ""), ("live", ""), ("metrics", "tgi_request_count")):
        with urllib.request.urlopen(f"{place.service.http}/{path}", timeout=10) as response:
            assert text in response.read().decode()
    assert len({generate(place), generate(place, "eight"), generate(place, "", "sql")}) == 3


def test_processes_have_no_capabilities(place: Hardened) -> None:
    num_routers = place.service.num_routers
    assert len(place.pids) == (
        4 if num_routers == 1 else 4 + num_routers
    )  # an engine process besides workers
    for pid in place.pids:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        status = {name: value.split() for name, value in (line.split(":", 1) for line in lines)}
        assert status["Uid"] == [str(USER_ID)] * 4
        assert status["Gid"] == ["0"] * 4
        assert set(status["Groups"]) <= {"0"}
        assert all(status[f"Cap{kind}"] == ["0" * 16] for kind in ("Inh", "Prm", "Eff", "Bnd", "Amb"))
        assert status["NoNewPrivs"] == ["1"]
    mounts = [line.split() for line in (place.proc / "mountinfo").read_text().splitlines()]
    options = {line[4]: line[5].split(",") for line in mounts}  # the last one includes those before
    writable = {path for path, said in options.items() if "rw" in said and not path.startswith("/proc")}
    assert writable == {"/tmp", str(AUDIT)}


def test_it_listens_only_on_configured_addresses(place: Hardened) -> None:
    """Other sockets are on loopback, or only for the service's user."""
    listening = place.addresses("tcp", "tcp6", states={"0A"})
    assert {port for host, port in listening if not ip_address(host).is_loopback} == {GRPC_PORT, HTTP_PORT}
    assert not place.addresses("udp", "udp6", "raw", "raw6")
    paths = place.unix_sockets()
    num_engine_sockets = int(place.service.num_routers > 1)
    assert len(paths) == 4 + num_engine_sockets, "calls and steps of two shards, and workers' messages"
    for path in paths:
        assert path.startswith("/"), "an abstract socket is everybody's"
        socket, directory = (place.root / path[1:]).stat(), (place.root / path[1:]).parent.stat()
        assert (socket.st_mode & 0o777, socket.st_uid) == (0o600, USER_ID)
        assert (directory.st_mode & 0o777, directory.st_uid) == (0o700, USER_ID)


def test_it_opens_no_outgoing_connection(place: Hardened) -> None:
    """Packets to other hosts would have had no route, and would have been counted."""
    generate(place, "eight")
    for event in chain(*place.audited().values()):
        if event.kind.startswith("socket."):
            assert event.kind not in ("socket.sendto", "socket.gethostbyname"), event
            assert any(
                host in event.what for host in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "/tmp/")
            ), event
    counters = place.counters()
    assert counters["UdpOutDatagrams"] == counters["Udp6OutDatagrams"] == 0
    assert counters["IpOutNoRoutes"] == counters["Ip6OutNoRoutes"] == 0
    for pid in place.pids[1:]:
        assert "HF_HUB_OFFLINE=1" in Path(f"/proc/{pid}/environ").read_text().split("\0")


def refusal(place: Hardened, **ids: str) -> str:
    with pytest.raises(grpc.RpcError) as caught:
        generate(place, **ids)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, ids
    return caught.value.details()


def test_hostile_ids_open_nothing(place: Hardened, files: Path) -> None:
    """Such paths are refused like paths that do not exist."""
    outside = files / "outside"
    watch, before = Watch(outside, outside / "b", outside / "lora"), place.audited()
    start, _, end = refusal(place, prefix_id="missing").split("missing")
    for pattern in filter(None, HOSTILE):
        id = pattern.replace("{outside}", str(FILES / "outside")).replace("{root}", str(STORE))
        text = refusal(place, prefix_id=id)
        assert (text.startswith(start), text.endswith(end)) == (True, True), text
        text = refusal(place, adapter_id=id)
        is_there = "decoder" in id or id == "empty"
        assert "does not exist" in text or text.startswith("Invalid adapter id '") or is_there, text
    news = [event for pid, all in place.audited().items() for event in all[len(before[pid]) :]]
    opened = [os.path.normpath(event.what) for event in news if not event.kind.startswith("socket.")]
    elsewhere = {path for path in opened if not path.startswith("/tmp/text-generation-")}
    assert elsewhere, "the store is looked at"
    assert all(Path(path).is_relative_to(STORE) for path in elsewhere), elsewhere
    assert not watch.has_seen()
    (outside / "decoder.pt").read_bytes()
    assert watch.has_seen()


def test_nothing_is_opened_that_is_not_its_own(place: Hardened) -> None:
    """From the first line of Python on, it opens only libraries, the machine's state, the model, the store,
    and the run's directory, which it creates in /tmp."""
    generate(place, "eight")
    known = [FILES / "model", STORE, Path.cwd(), *map(Path, (sys.base_prefix, sys.prefix, "/usr", "/lib"))]
    known += [*map(Path, ("/proc", "/sys", "/dev", *filter(None, sys.path)))]
    for event in chain(*place.audited().values()):
        path = Path(os.path.normpath(Path.cwd() / event.what))
        is_temporary = TMP in (path, path.parent) or str(path).startswith("/tmp/text-generation-")
        is_known = is_temporary or any(path.is_relative_to(one) for one in known)
        assert is_known or event.kind.startswith("socket."), event


@pytest.mark.slow
def test_kernels_are_compiled_once(files: Path) -> None:
    """Without packaged kernels, and with only /tmp writable, restarted shards use the kernels that the first
    ones compiled."""
    place = Hardened(files.parent, files, size="128m", is_compiled=False)
    try:
        os.kill(children_of(place.service.process.pid)["serve"][0], signal.SIGKILL)
        place.service.wait_for_line("requests resume", 120)
        generate(place)
        times = [float(match[1]) for line in place.service.lines if (match := LOADED.search(line))]
    finally:
        code = place.end()
    assert code == 0, place.service.output
    first, second = max(times[:2]), max(times[2:])
    assert (len(times), second < first / 3) == (4, True), times
