"""A model that is not on disk, downloaded by a real launcher from a hub over real sockets."""

import asyncio
import json
import random
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.hub_server import Hub, Repo
from tests.support.processes import Service, children_of
from tests.support.shard.checkpoints import write_llama
from tests.support.shard.gguf_writer import write_gguf
from tests.support.tokenizers.trained import write_byte_level
from tgis.config.processes import LauncherConfig
from tgis.hub.model_files import is_complete
from tgis.launcher.plan import LaunchError
from tgis.launcher.startup_downloads import download_missing
from tgis.pb import generation_pb2 as pb
from tgis.pb import generation_pb2_grpc

TOKEN = "hf_a-token-of-this-test"
PORTS = ["--hostname", "127.0.0.1", "--port", "0", "--grpc-port", "0"]
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    directory = tmp_path_factory.mktemp("model")
    write_byte_level(directory, 400)
    write_llama(directory, vocab_size=400, eos_token_id=0)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.fixture
def hub(files: dict[str, bytes]) -> Iterator[Hub]:
    with Hub() as hub:
        hub.repos["org/m"] = Repo(files, branches=("main", "v1"), needs_token=TOKEN)
        yield hub


def launch(hub: Hub, cache: Path, *arguments: str, **env: str) -> Service:
    variables = {
        "COMPAT": "tgi",
        "MODEL_ID": "org/m",
        "HF_TOKEN": TOKEN,
        "HF_API_TOKEN": TOKEN,
        "HUGGING_FACE_HUB_TOKEN": TOKEN,
        "HF_ENDPOINT": hub.endpoint,
        "HF_HUB_OFFLINE": "0",
        "TERMINATION_LOG": str(cache.parent / "log"),
    }
    words = ["--huggingface-hub-cache", str(cache), *PORTS, *arguments]
    return Service(["launcher", *words], {**variables, **env})


def last_line(service: Service) -> str:
    code = service.process.wait(60)
    assert service.end() == code == 1, service.output
    return service.lines[-1]


@pytest.mark.slow
def test_it_is_served_and_the_hub_is_not_asked_again(
    hub: Hub, files: dict[str, bytes], tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    service = launch(hub, cache).wait_until_serving()
    try:
        with service.channel() as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            asked = pb.BatchedGenerationRequest(requests=[pb.GenerationRequest(text="the")])
            assert stub.Generate(asked).responses[0].generated_token_count > 0
        children = children_of(service.process.pid)
        assert children.keys() == {"router", "serve"}
        for pid in (one for pids in children.values() for one in pids):
            variables = Path(f"/proc/{pid}/environ").read_text().split("\0")
            assert "HF_HUB_OFFLINE=1" in variables
            assert not [one for one in variables if TOKEN in one or one.startswith("HF_ENDPOINT")]
    finally:
        code = service.end()
    assert code == 0, service.output
    assert TOKEN not in service.output
    assert any("org/m is not on disk: downloading it" in line for line in service.lines)
    assert any(f"Download: Downloading {len(files)} files for model org/m" in line for line in service.lines)
    assert any("chats use the template of " in line for line in service.lines)
    hub.requests.clear()
    again = launch(hub, cache, HF_TOKEN="", HF_API_TOKEN="").wait_until_serving()
    assert again.end() == 0, again.output
    assert not hub.requests


@pytest.mark.parametrize(
    ("arguments", "env", "end"),
    [
        (
            [],
            {"HF_TOKEN": "wrong", "HF_API_TOKEN": ""},
            "org/m: the hub refuses access (HTTP 401); check the token",
        ),
        pytest.param(["--revision", "v9"], {}, "org/m has no revision v9 on the hub", marks=pytest.mark.slow),
        pytest.param(
            ["--lora-adapters", "org/a"],
            {"MODEL_ID": "."},
            "org/a is not on the hub, or is private and needs a token in --token or HF_TOKEN",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_download_that_fails_ends_the_start(
    hub: Hub, tmp_path: Path, arguments: list[str], env: dict[str, str], end: str
) -> None:
    service = launch(hub, tmp_path / "cache", *arguments, **env)
    assert last_line(service) == f"error: download: {end}", service.output
    assert TOKEN not in service.output
    assert (tmp_path / "log").read_text() == f"download: {end}\n"


def config_of(hub: Hub, cache: Path, **changes: Any) -> LauncherConfig:
    plain = LauncherConfig(
        model_name="org/m", compat="tgi", hf_hub_cache=str(cache), hf_endpoint=hub.endpoint
    )
    return replace(plain, **changes)


def download(config: LauncherConfig) -> None:
    asyncio.run(download_missing(config))


@pytest.mark.parametrize(
    "changes",
    [
        {"compat": None},
        {"hf_hub_offline": "1"},
        {"transformers_offline": "yes"},
        {"model_name": "/nowhere/m"},
        {"model_name": "../m"},
        {"model_name": "a/b/c"},
        {"model_name": "tgis"},  # a directory
        {"hf_hub_offline": "on", "lora_adapters": "org/a", "tokenizer_name": "org/t"},
    ],
    ids=str,
)
def test_nothing_is_downloaded(hub: Hub, tmp_path: Path, changes: dict[str, Any]) -> None:
    download(config_of(hub, tmp_path, **changes))
    assert not hub.requests
    assert not [*tmp_path.iterdir()]


def test_code_is_downloaded_of_a_known_revision_only(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"^trust_remote_code: org/m would be downloaded .* --revision"):
        download(config_of(hub, tmp_path, trust_remote_code=True))
    assert not hub.requests


def test_parts_of_a_model(hub: Hub, tmp_path: Path) -> None:
    """The hub is not asked for a model in the cache if all its files exist."""
    snapshot = tmp_path / "models--org--m" / "snapshots" / "v1"
    snapshot.mkdir(parents=True)
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    for name in ("config.json", "one.safetensors", "two.safetensors"):
        assert not is_complete(snapshot)
        (snapshot / name).write_text("{}")
    assert is_complete(snapshot)
    download(config_of(hub, tmp_path, revision="v1"))
    assert not hub.requests
    (snapshot / "two.safetensors").unlink()
    (snapshot / "pytorch_model.bin").symlink_to("/nowhere/blob")
    assert not is_complete(snapshot)
    (snapshot / "pytorch_model.bin").unlink()
    (snapshot / "pytorch_model.bin").touch()
    assert is_complete(snapshot), "weights of either kind are served"


@pytest.mark.slow
def test_tokenizers_and_adapters(hub: Hub, tmp_path: Path) -> None:
    adapter = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"a", "README.md": b""}
    hub.repos["org/a"] = Repo(adapter, branches=("main", "v2"))
    hub.repos["org/t"] = Repo({"tokenizer.json": b"{}", "model.safetensors": b"a", "config.json": b"{}"})
    config = config_of(hub, tmp_path, model_name=".", lora_adapters="x=/x,org/a@v2", tokenizer_name="org/t")
    download(config)
    files = {path.relative_to(tmp_path).as_posix() for path in tmp_path.glob("*/snapshots/*/*")}
    folder = f"snapshots/{hub.repos['org/a'].commit}"
    assert files == {
        f"models--org--a/{folder}/adapter_config.json",
        f"models--org--a/{folder}/adapter_model.safetensors",
        f"models--org--t/{folder}/tokenizer.json",
        f"models--org--t/{folder}/config.json",
    }
    hub.requests.clear()
    download(config)
    assert not hub.requests


@pytest.mark.slow
def test_speculators_and_the_models_that_they_name(hub: Hub, tmp_path: Path) -> None:
    base = {"model.safetensors": b"a", "config.json": b"{}", "tokenizer.json": b"{}"}
    heads = {"medusa_lm_head.safetensors": b"a", "README.md": b""}
    named = json.dumps({"medusa_num_heads": 1, "base_model_name_or_path": "org/m"}).encode()
    hub.repos["org/m"] = Repo(base)
    hub.repos["org/heads"] = Repo(heads | {"config.json": named})
    hub.repos["org/others"] = Repo(heads | {"config.json": b"{}"})
    config = config_of(hub, tmp_path, model_name="org/heads", speculator="org/others")
    download(replace(config, speculate=0))
    assert not [*tmp_path.glob("models--org--others")]
    download(config)
    files = {path.relative_to(tmp_path).as_posix() for path in tmp_path.glob("*/snapshots/*/*.safetensors")}
    assert {file.partition("/")[0] for file in files} == {
        "models--org--heads",
        "models--org--m",
        "models--org--others",
    }
    hub.requests.clear()
    download(config)
    download(replace(config, speculator="mtp"))
    assert not hub.requests


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.slow
def test_a_download_that_is_stopped_goes_on_at_the_next_start(
    hub: Hub, files: dict[str, bytes], tmp_path: Path, number: signal.Signals
) -> None:
    """The weights are incomplete; everything else exists. The next start fails for another reason."""
    large = files | {"model.safetensors": random.Random(0).randbytes(24_000_000)}
    hub.repos["org/m"] = Repo(large, needs_token=TOKEN)
    released, cache = threading.Event(), tmp_path / "cache"

    def pause(handler: Any, content: bytes) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(content)))
        handler.end_headers()
        handler.wfile.write(content[:22_000_000])
        released.wait(60)
        handler.wfile.write(content[22_000_000:])

    # The directory of a commit exists once the first file does.
    revision = ["--revision", hub.repos["org/m"].commit]
    hub.faults["model.safetensors"] = deque([pause])
    service = launch(hub, cache, *revision)
    [part] = wait_for_parts(cache)
    service.process.send_signal(number)
    time.sleep(2)
    released.set()  # the rest is not read
    assert service.process.wait(30) == 0
    assert service.end() == 0, service.output
    assert "the download of org/m was stopped; the next start resumes it" in service.output
    assert 10_000_000 <= part.stat().st_size < 24_000_000
    hub.requests.clear()
    again = launch(hub, cache, *revision)
    assert "safetensors" in last_line(again)
    assert "org/m is not on disk" in again.output
    assert [one.range for one in hub.asked("GET", "model.safetensors") if one.range], "it began anew"


def wait_for_parts(cache: Path) -> list[Path]:
    for _ in range(600):
        parts = [one for one in cache.glob("*/blobs/*.incomplete") if one.stat().st_size >= 10_000_000]
        if parts:
            return parts
        time.sleep(0.05)
    raise AssertionError("nothing arrives")


@pytest.mark.slow
def test_a_gguf_file_of_the_hub_is_downloaded_and_served(hub: Hub, tmp_path: Path) -> None:
    write_llama(tmp_path / "written")
    write_gguf(tmp_path / "written", tmp_path / "small.gguf", "llama")
    content = (tmp_path / "small.gguf").read_bytes()
    hub.repos["org/m"] = Repo({"small.gguf": content, "other.gguf": b"GGUF"}, needs_token=TOKEN)
    service = launch(hub, tmp_path / "cache", MODEL_ID="org/m:small.gguf").wait_until_serving()
    assert service.end() == 0, service.output
    assert any("org/m:small.gguf is not on disk: downloading it" in line for line in service.lines)
    assert not list((tmp_path / "cache").rglob("other.gguf"))
