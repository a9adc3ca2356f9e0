"""`download-weights` against a hub over real sockets: the content of the cache, and the errors."""

import hashlib
import io
import logging
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from huggingface_hub import close_session, constants
from safetensors.torch import load_file

from tests.support import hub_server
from tests.support.hub_server import Hub, Repo
from tests.support.tokenizers.older_kinds import write_gpt2
from tgis.cli.models import convert_to_safetensors, download_weights
from tgis.hub import download as download_module
from tgis.hub import download_progress

WEIGHTS = random.Random(0).randbytes(24_000_000)  # the library reads ten million bytes at once
SMALL = random.Random(1).randbytes(3000)
REST = {"config.json": b"{}", "tokenizer.json": b'{"version": "1.0"}'}

Download = Callable[..., Result]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """Set the only hub that the library knows, here and in child processes."""
    for name in [name for name in os.environ if name.startswith(("HF_", "HUGGING", "TRANSFORMERS_"))]:
        monkeypatch.delenv(name)
    with Hub() as hub:
        hub.repos["org/m"] = Repo({**REST, "model.safetensors": SMALL})
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
        monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
        template = hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.setattr(download_module, "DELAYS_S", (0.01,) * 4)
        yield hub
        close_session()


@pytest.fixture
def entry(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "models--org--m"


@pytest.fixture
def download(hub: Hub, tmp_path: Path) -> Download:
    """Run the command without the tokenizer."""

    def run(*arguments: str, name: str = "org/m", cache: Path | None = None) -> Result:
        env = {"HF_HUB_CACHE": str(cache or tmp_path / "cache")}
        words = [name, "--no-auto-convert", *arguments]
        return CliRunner().invoke(download_weights, words, env=env, catch_exceptions=False)

    return run


def start(cache: Path, *arguments: str, **env: str) -> subprocess.Popen[str]:
    """Run the same in a separate process."""
    return subprocess.Popen(
        [sys.executable, "-m", "tgis", "download-weights", "org/m", "--no-auto-convert", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "HF_HUB_CACHE": str(cache), **env},
    )


def content(entry: Path, name: str, commit: str = Repo({}).commit) -> bytes:
    return (entry / "snapshots" / commit / name).read_bytes()


def refusal(result: Result, code: int = 1) -> str:
    """Return the only line besides the log's."""
    assert result.exit_code == code, result.stderr
    lines = [line for line in result.stderr.splitlines() if " INFO " not in line]
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("error: ")
    assert not re.search("SECRET|hf_mine|http:", result.stderr)
    return lines[0].removeprefix("error: ")


def test_files_of_the_top_level_go_to_the_cache(hub: Hub, entry: Path, download: Download) -> None:
    others = ["training_args.json", "args.md", "sub/x.json", "model.bin", "vocab.txt", "logo.png"]
    hub.repos["org/m"].files |= {"README.md": b"# M", "code.py": b"1", **dict.fromkeys(others, b"no")}
    result = download()
    assert (result.exit_code, result.stdout) == (0, "Downloading 5 files for model org/m\n"), result.stderr
    assert content(entry, "model.safetensors") == SMALL
    names = {path.name for path in (entry / "snapshots" / Repo({}).commit).iterdir()}
    assert names == {"README.md", "code.py", "config.json", "model.safetensors", "tokenizer.json"}
    assert (entry / "refs" / "main").read_text() == Repo({}).commit
    assert all(path.is_symlink() for path in (entry / "snapshots" / Repo({}).commit).iterdir())

    before = len(hub.requests)
    assert download("--extension", ".json, .txt").stdout == "Downloading 3 files for model org/m\n"
    assert content(entry, "vocab.txt") == b"no"
    fetched = [one.path for one in hub.requests[before:] if one.method == "GET" and "resolve" in one.path]
    assert [path.rpartition("/")[2] for path in fetched] == ["vocab.txt"]
    assert "org/m" in download("--extension", ".onnx", name="org/m/").stdout


def test_a_gguf_file_and_a_split_set(hub: Hub, entry: Path, download: Download) -> None:
    parts = [f"large-0000{number}-of-00002.gguf" for number in (1, 2)]
    hub.repos["org/m"] = Repo({**REST, "a.gguf": SMALL, "b.gguf": b"b", **dict.fromkeys(parts, SMALL[:9])})
    assert refusal(download()) == (
        "org/m has GGUF files: download one by its name, org/m:a.gguf, or all: --extension .gguf"
    )
    assert download(name="org/m:a.gguf").exit_code == 0
    snapshot = entry / "snapshots" / hub.repos["org/m"].commit
    assert [path.name for path in snapshot.iterdir()] == ["a.gguf"]
    assert (snapshot / "a.gguf").read_bytes() == SMALL
    assert download(name=f"org/m:{parts[1]}").exit_code == 0
    assert sorted(path.name for path in snapshot.iterdir()) == ["a.gguf", *parts]
    assert refusal(download(name="org/m:c.gguf")) == "org/m has no c.gguf"
    assert (
        refusal(download(name="org/m:large-00001-of-00003.gguf")) == "org/m has no large-00001-of-00003.gguf"
    )


def test_a_revision_and_a_token(hub: Hub, entry: Path, download: Download) -> None:
    other = "beef" + 36 * "0"
    hub.repos["org/m"] = Repo({"model.safetensors": SMALL}, other, ("v2",), needs_token="hf_mine")
    assert download("--revision", "v2", "--token", "hf_mine").exit_code == 0
    assert content(entry, "model.safetensors", other) == SMALL
    assert (entry / "refs" / "v2").read_text() == other
    assert not (entry / "refs" / "main").exists()
    shutil.rmtree(entry)
    process = start(entry.parent, "--revision", other, HF_TOKEN="hf_mine")
    assert process.communicate(timeout=30) == ("Downloading 1 files for model org/m\n", "")
    assert process.returncode == 0
    assert content(entry, "model.safetensors", other) == SMALL
    tokens = {one.token for one in hub.requests if one.path.startswith("/stored/")}
    assert tokens == {None}  # only the hub's


@pytest.mark.parametrize("reset", [False, True])
def test_a_connection_that_ends_in_the_middle(hub: Hub, entry: Path, download: Download, reset: bool) -> None:
    hub.repos["org/m"].files["model.safetensors"] = WEIGHTS
    hub.faults["model.safetensors"] = deque([hub_server.cut_after(12_000_000, reset)])
    result = download()
    assert result.exit_code == 0, result.stderr
    assert content(entry, "model.safetensors") == WEIGHTS
    ranges = [one.range for one in hub.requests if one.path.startswith("/stored/")]
    assert ranges[0] is None
    assert ranges[1:] == ["bytes=10485760-"] or (reset and ranges[1:] == [None])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_process_that_ends_in_the_middle(
    hub: Hub, entry: Path, download: Download, number: signal.Signals
) -> None:
    hub.repos["org/m"].files["model.safetensors"] = WEIGHTS
    begun = threading.Event()
    hub.faults["model.safetensors"] = deque([hub_server.hold(begun, 22_000_000)])
    process = start(entry.parent)
    assert begun.wait(30)
    [part] = wait_for(lambda: [p for p in (entry / "blobs").glob("*.incomplete") if p.stat().st_size])
    process.send_signal(number)
    while process.poll() is None:  # the second SIGTERM does not wait for the hub
        time.sleep(0.1)
        process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode != 0
    assert not (entry / "refs").exists()
    kept = part.stat().st_size
    assert kept >= 10_000_000
    assert download().exit_code == 0
    assert content(entry, "model.safetensors") == WEIGHTS
    assert [one.range for one in hub.requests if one.path.startswith("/stored/")][1:] == [f"bytes={kept}-"]
    assert not part.exists()


def test_progress_is_logged(hub: Hub, download: Download, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download_progress, "INTERVAL_S", 0.02)
    hub.repos["org/m"].files["model.safetensors"] = WEIGHTS
    is_logged = threading.Event()

    def in_two_parts(handler: Any, content: bytes) -> None:
        """The library reads ten million bytes at once."""
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(content)))
        handler.end_headers()
        handler.wfile.write(content[:22_000_000])
        is_logged.wait(10)
        handler.wfile.write(content[22_000_000:])

    class Watch(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if re.fullmatch(r"org/m: received [12]\d\.\d of 24\.0 MB", record.getMessage()):
                is_logged.set()

    watch = Watch()
    download_progress.logger.addHandler(watch)
    hub.faults["model.safetensors"] = deque([in_two_parts])
    assert download().exit_code == 0
    download_progress.logger.removeHandler(watch)
    assert is_logged.is_set()
    assert not [thread for thread in threading.enumerate() if thread.name == "download progress"]


@pytest.mark.parametrize("rest", [b"", b"and more"])
def test_leftovers_of_another_process(hub: Hub, entry: Path, download: Download, rest: bytes) -> None:
    part = entry / "blobs" / f"{hashlib.sha256(SMALL).hexdigest()}.incomplete"
    part.parent.mkdir(parents=True)
    part.write_bytes(SMALL + rest)
    assert download().exit_code == 0
    assert content(entry, "model.safetensors") == SMALL
    fetched = [one.range for one in hub.requests if one.path.startswith("/stored/")]
    assert fetched == ([None] if rest else [])  # the whole file again, or nothing


def wait_for(find: Callable[[], list[Path]]) -> list[Path]:
    pause = threading.Event()
    for _ in range(500):
        if value := find():
            return value
        pause.wait(0.02)
    raise AssertionError("it has not happened")


def test_another_try_where_the_hub_recovers(hub: Hub, entry: Path, download: Download) -> None:
    hub.faults["org/m"] = deque([hub_server.status(503)])
    hub.faults["model.safetensors"] = deque([hub_server.status(502)])
    result = download()
    assert result.exit_code == 0, result.stderr
    assert content(entry, "model.safetensors") == SMALL
    assert result.stderr.count("retrying") == 2


@pytest.mark.parametrize(
    ("name", "fault", "text"),
    [
        ("model.safetensors", hub_server.other_bytes, "model.safetensors arrived with a wrong checksum"),
        ("config.json", hub_server.other_bytes, "config.json arrived with a wrong checksum"),
        ("model.safetensors", hub_server.fewer_bytes, "model.safetensors arrived with 2990 of 3000 bytes"),
        ("model.safetensors", hub_server.status(403), "org/m: model.safetensors: the hub refuses access"),
        (
            "model.safetensors",
            hub_server.status(410),
            "org/m: model.safetensors: the hub returns HTTP 410",
        ),
    ],
)
def test_damaged_downloads_are_refused(
    hub: Hub, entry: Path, download: Download, name: str, fault: hub_server.Fault, text: str
) -> None:
    hub.repos["org/m"].files["config.json"] = b'{"a": 1}'
    hub.faults[name] = deque([fault])
    assert refusal(download()).startswith(text)
    assert not (entry / "refs").exists()
    assert not (entry / "snapshots" / Repo({}).commit / name).exists()
    assert download().exit_code == 0
    assert content(entry, name) == hub.repos["org/m"].files[name]


def test_a_blob_that_somebody_cut_short_is_replaced(hub: Hub, entry: Path, download: Download) -> None:
    assert download().exit_code == 0
    link = entry / "snapshots" / Repo({}).commit / "model.safetensors"
    os.truncate(link, 100)
    assert download().exit_code == 0
    assert (link.read_bytes(), link.is_symlink()) == (SMALL, True)


def test_refusals_of_the_hub(hub: Hub, download: Download) -> None:
    hub.repos["org/gated"] = Repo({}, error_code="GatedRepo")
    hub.repos["org/private"] = Repo({}, needs_token="x")
    assert refusal(download(name="org/gated")).startswith("org/gated: access is gated; request it")
    assert refusal(download(name="org/none")).startswith(
        "org/none is not on the hub, or is private and needs"
    )
    assert refusal(download("--revision", "v9")) == "org/m has no revision v9 on the hub"
    assert refusal(download("--token", "hf_mine", name="org/private")).startswith(
        "org/private: the hub refuses access (HTTP 401)"
    )
    text = refusal(download(name="/no/such/directory"))
    assert text == "/no/such/directory is neither a directory nor the id of a model on the hub"
    hub.wrong_sums["model.safetensors"] = "../../x"
    assert refusal(download()) == "model.safetensors: the hub returned no valid ETag"


def test_no_network(hub: Hub, download: Download, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert refusal(download()) == "org/m cannot be downloaded: HF_HUB_OFFLINE is set"
    assert not hub.requests
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://user:hf_mine@localhost:1")
    assert refusal(download()) == "org/m: the hub at localhost cannot be reached: Connection refused"


def test_an_endpoint_that_is_no_address(download: Download, monkeypatch: pytest.MonkeyPatch) -> None:
    for endpoint in ("nonsense", "ftp://hub", "http://"):
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        result = download()
        assert result.exit_code == 1
        assert "HF_ENDPOINT is not the URL of a hub" in result.stderr


def test_a_hub_without_the_faster_way(hub: Hub, entry: Path, download: Download) -> None:
    hub.xet = True
    result = download()
    assert result.exit_code == 0, result.stderr
    assert content(entry, "model.safetensors") == SMALL
    assert "model.safetensors: xet failed" in result.stderr
    assert hub.asked("GET", "/xet/token")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Create a file of four million bytes."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a small disk")
    directory = tmp_path / "disk"
    directory.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4000k", "none", directory], check=True)
    yield directory
    subprocess.run(["umount", directory], check=True)


def test_a_disk_that_is_too_small(hub: Hub, download: Download, small_disk: Path) -> None:
    hub.repos["org/m"].files["model.safetensors"] = WEIGHTS
    text = refusal(download(cache=small_disk))
    assert text == f"org/m needs 24.0 MB more, but {small_disk} has 4.1 MB"
    assert not hub.asked("GET", "model.safetensors")
    hub.hidden_sizes = True
    text = refusal(download(cache=small_disk))
    # Any of the concurrent downloads may be the first to notice.
    assert re.fullmatch(r"org/m: [a-z._]+: no space left in the hub cache", text)


def pickled(tensors: dict[str, torch.Tensor]) -> bytes:
    buffer = io.BytesIO()
    torch.save(tensors, buffer)
    return buffer.getvalue()


def test_pickles_are_converted_where_the_hub_has_nothing_else(hub: Hub, entry: Path) -> None:
    tensors = {"x": torch.arange(6.0)}
    files = {"config.json": b"{}", "tokenizer.json": b"{}", "pytorch_model.bin": pickled(tensors)}
    hub.repos["org/m"].files = files | {"training_args.bin": b"no"}
    run, env = CliRunner(), {"HF_HUB_CACHE": str(entry.parent)}
    result = run.invoke(download_weights, ["org/m"], env=env, catch_exceptions=False)
    assert result.stdout.splitlines() == [
        "Downloading 2 files for model org/m",
        ".safetensors weights not found, downloading pytorch weights to convert...",
        "Downloading 1 files for model org/m",
        ".safetensors weights not found, converting from pytorch weights...",
        "Converted 1 files to .safetensors",
        "Model org/m already has a fast tokenizer",
    ], result.stderr
    directory = entry / "snapshots" / Repo({}).commit
    assert torch.equal(load_file(directory / "model.safetensors")["x"], tensors["x"])
    result = run.invoke(download_weights, ["org/m"], env=env, catch_exceptions=False)
    assert result.stdout.splitlines()[1:] == [
        ".safetensors weights not found on hub, but were found locally. Remove them first to re-convert",
        "Model org/m already has a fast tokenizer",
    ]
    result = run.invoke(convert_to_safetensors, ["org/m"], env=env, catch_exceptions=False)
    assert result.stdout == "Existing .safetensors weights found, remove them first to reconvert\n"

    (directory / "model.safetensors").unlink()
    words = ["org/m", "--extension", ".bin, .safetensors"]
    result = run.invoke(download_weights, words, env=env, catch_exceptions=False)
    assert result.stdout.splitlines()[:2] == [
        "Downloading 1 files for model org/m",
        ".safetensors weights not found, converting from pytorch weights...",
    ]
    result = run.invoke(download_weights, [str(directory), "--extension", ".bin"], catch_exceptions=False)
    assert result.stdout.splitlines()[0] == f"{directory} is a directory, nothing is downloaded"


def test_tokenizer_files_are_downloaded_too(hub: Hub, entry: Path, tmp_path: Path) -> None:
    write_gpt2(tmp_path)
    made_of = {name: (tmp_path / name).read_bytes() for name in ("config.json", "vocab.json", "merges.txt")}
    hub.repos["org/m"].files = made_of | {"model.safetensors": SMALL, "notes.txt": b"no"}
    env = {"HF_HUB_CACHE": str(entry.parent)}
    result = CliRunner().invoke(download_weights, ["org/m"], env=env, catch_exceptions=False)
    directory = entry / "snapshots" / Repo({}).commit
    assert result.stdout.splitlines() == [
        "Downloading 4 files for model org/m",
        f"Saved tokenizer to {directory}",
    ], result.stderr
    assert (directory / "tokenizer.json").is_file()
