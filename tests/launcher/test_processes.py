"""The launcher with real children: their configuration, and its end."""

import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from grpc import insecure_channel

import tgis
from tests.support.processes import Service, children_of
from tests.support.prompt_files import save_lora
from tests.support.shard.checkpoints import write_llama
from tests.support.tokenizers.trained import write_byte_level
from tgis.pb import shard_pb2 as pb
from tgis.pb.shard_pb2_grpc import ShardServiceStub

ENV = {
    "NUM_GPUS": "2",
    "CUDA_VISIBLE_DEVICES": "0,1,2,3",
    "MAX_WAITING_TOKENS": "24",
    "ESTIMATE_MEMORY": "manual",
    "LOG_LEVEL": "warn",
    "MAX_CONCURRENT_REQUESTS": "64",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    "PREFIX_STORE_PATH": "prompts/of ours",
    "OTLP_SERVICE_NAME": "unused without an endpoint",
    "ROUTER_WORKERS": "1",
}


def launch(directory: Path, *flags: str, env: dict[str, str] | None = None) -> Service:
    ports = ["--bind", "127.0.0.1", "--port", "0", "--grpc-port", "0"]
    log = ["--termination-log", str(directory / "termination-log")]
    return Service(["launcher", "--model-name", f"{directory}/", *ports, *log, *flags], env)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_llama(directory, vocab_size=400, eos_token_id=1)
    write_byte_level(directory, 400)
    save_lora(directory / "sql")
    return directory


@pytest.fixture(scope="module")
def sockets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sockets")


@pytest.fixture(scope="module")
def service(model: Path, sockets: Path) -> Iterator[Service]:
    """A run with two shards leaves no files."""
    own = {"SHARD_UDS_PATH": f"{sockets}/shard", "ADAPTER_CACHE": str(model)}
    service = launch(
        model, "--dtype", "float32", "--log-level", "debug", env=ENV | own
    )  # debug logs the shards' options
    try:
        yield service.wait_until_serving()
    finally:
        code = service.end()
    assert code == 0, service.output
    assert not list(sockets.iterdir())
    assert not (model / "termination-log").exists()


def commands(service: Service) -> dict[str, list[list[str]]]:
    """Return the children by their kind."""
    children = children_of(service.process.pid)
    return {kind: [strings(pid, "cmdline") for pid in pids] for kind, pids in children.items()}


def strings(pid: int, name: str) -> list[str]:
    return Path(f"/proc/{pid}/{name}").read_text().split("\0")


def test_children_get_flags_and_not_the_variables(service: Service) -> None:
    by_command = commands(service)
    assert (len(by_command["serve"]), len(by_command["router"])) == (2, 1)
    [router] = by_command["router"]
    assert router[router.index("--max-concurrent-requests") + 1] == "64"
    assert router[router.index("--max-sequence-length") + 1] == "512"
    assert "--otlp-service-name" not in router
    received = [line for line in service.lines if "options from the launcher: " in line]
    for rank, options in enumerate(sorted(received)):
        assert f" --rank {rank} " in options
        assert f" --prefix-store-path {Path.cwd()}/prompts/of ours " in options
    assert len(received) == 2
    for pids in children_of(service.process.pid).values():
        for pid in pids:
            names = {line.partition("=")[0] for line in strings(pid, "environ")}
            assert not names & {
                "MAX_WAITING_TOKENS",
                "ESTIMATE_MEMORY",
                "LOG_LEVEL",
                "MAX_CONCURRENT_REQUESTS",
                "PREFIX_STORE_PATH",
            }
            assert {"PYTORCH_CUDA_ALLOC_CONF", "CUDA_VISIBLE_DEVICES"} <= names


def test_options_without_effect_are_logged_once(service: Service) -> None:
    for name in ("MAX_WAITING_TOKENS", "ESTIMATE_MEMORY"):
        assert sum(f"{name} has no effect" in line for line in service.lines) == 1, service.output


def test_copies_are_beside_the_sockets(service: Service, sockets: Path) -> None:
    shard = insecure_channel(f"unix:{sockets}/shard-0")
    with shard:
        request = pb.FindRequest(kind=pb.CONTENT_KIND_ADAPTER, id="sql")
        digest = ShardServiceStub(shard).Find(request, timeout=20).digest
    names = ["shard-0", "shard-0.steps", "shard-1", "shard-1.steps", "shard-contents"]
    assert sorted(path.name for path in sockets.iterdir()) == names
    assert (sockets / "shard-contents" / digest).is_file()


def test_a_bus_error_of_a_shard_is_explained(service: Service) -> None:
    os.kill(children_of(service.process.pid)["serve"][1], signal.SIGBUS)
    service.wait_for_line("was killed by SIGBUS; the shards may lack shared memory: mount at least 1 GB")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_while_the_model_is_loading_is_a_clean_end(
    model: Path, tmp_path_factory: pytest.TempPathFactory, number: signal.Signals
) -> None:
    home = tmp_path_factory.mktemp("home")
    service = launch(model, env={"TMPDIR": str(home)})
    service.wait_for_line("loading")
    assert service.end(number, timeout_s=5) == 0, service.output
    assert "Traceback" not in service.output
    assert not list(home.iterdir())


def test_a_path_that_no_socket_can_have_is_refused(
    model: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The launcher ends at once, before the model has loaded; no process remains."""
    long, home = tmp_path / ("x" * 80), tmp_path_factory.mktemp("home")
    service = launch(model, "--shard-uds-path", str(long), env={"TMPDIR": str(home)})
    assert service.process.wait(20) == 1
    assert service.end() == 1
    assert service.lines[-1].startswith(f"error: {long}-0.steps is too long for a socket's path: set ")
    assert not list(home.iterdir())
    (model / "termination-log").unlink()


def test_tls_is_checked_before_anything_is_started(model: Path, tmp_path: Path) -> None:
    service = launch(model, "--tls-cert-path", "/nowhere")
    assert service.process.wait(20) == 1
    assert service.end() == 1
    assert service.lines[-1] == "error: tls: must provide both cert and key"
    log = model / "termination-log"
    assert log.read_text() == "tls: must provide both cert and key\n"
    log.unlink()


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (
            ["--model-name", "x" * 5000],
            f"Failed to resolve config path: Model {'x' * 200} not found: ",
        ),
        (["--model-name", "{home}/deep"], "{home}/deep/config.json is nested too deep to be read"),
        (
            ["--model-name", "{home}/untyped"],
            "{home}/untyped/config.json has no model_type, the name of the model's architecture",
        ),
        (["--model-name", "{home}/caf\udce9"], "Failed to resolve config path: the path {home}/caf"),
        (
            ["--shard-uds-path", "{home}/caf\udce9"],
            "{home}/caf\\udce9-0.steps: a socket's path must be UTF-8",
        ),
        (["--lora-adapters", "a={home}/\udce9"], "lora_adapters: a: there is no directory {home}/\\udce9"),
        (["--bind", ""], "bind: the address is empty; 0.0.0.0 means all addresses"),
        (["--bind", "a..b"], "port 0 on a..b cannot be opened: the address is not valid"),
        (["--port", "4444", "--grpc-port", "4444"], "port and grpc_port are both 4444: HTTP and gRPC need"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_refused_in_one_line_before_anything_is_started(
    model: Path, tmp_path: Path, flags: list[str], text: str
) -> None:
    for name, config in (
        ("deep", '{"a":' * 10**5),
        ("untyped", "{}"),
        ("caf\udce9", '{"model_type": "llama"}'),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(config)
    service = launch(model, *(flag.format(home=tmp_path) for flag in flags))
    assert service.process.wait(20) == 1
    assert service.end() == 1
    assert service.lines[-1].startswith("error: " + text.format(home=tmp_path)), service.output
    assert "Traceback" not in service.output
    assert "loading" not in service.output or "--shard-uds-path" in flags
    log = model / "termination-log"
    assert log.read_text() == service.lines[-1].removeprefix("error: ") + "\n"
    log.unlink()


def test_a_killed_router_ends_everything(model: Path) -> None:
    service = launch(model, "--router-workers", "1")
    service.wait_for_line("loading")
    while not {"router", "serve"} <= (children := children_of(service.process.pid)).keys():
        assert service.process.poll() is None
    os.kill(children["router"][0], signal.SIGKILL)
    assert service.process.wait(20) == 1
    assert service.end() == 1
    text = "router was killed by SIGKILL (out of memory?)"
    assert service.lines[-1] == f"error: {text}"
    log = model / "termination-log"
    assert log.read_text() == text + "\n"
    log.unlink()
    for pid in (*children["router"], *children["serve"]):
        assert not Path(f"/proc/{pid}").exists()


@pytest.mark.slow
def test_a_first_start_says_that_it_compiles(model: Path, tmp_path: Path) -> None:
    """The second start prints nothing. The package is a copy, without compiled code."""
    package = Path(tgis.__file__).parent
    shutil.copytree(package, tmp_path / "tgis", ignore=shutil.ignore_patterns("__pycache__"))
    env = {"PYTHONPATH": str(tmp_path), "PYTHONSAFEPATH": "1", "HOME": str(tmp_path)}
    text = "on an idle machine this takes 10 to 30 seconds, and the code is stored in " + str(tmp_path)
    first = launch(model, env=env).wait_until_serving(300)
    assert first.end() == 0
    assert sum(text in line for line in first.lines) == 1, first.output
    compiled = [line for line in first.lines if re.search(r": compiled \d+ kernels in [\d.]+ s", line)]
    assert 2 <= len(compiled) <= 12, first.output
    assert [line.endswith("so far") for line in compiled] == [True] * (len(compiled) - 1) + [False]
    second = launch(model, env=env).wait_until_serving()
    assert second.end() == 0
    assert "kernels" not in second.output
