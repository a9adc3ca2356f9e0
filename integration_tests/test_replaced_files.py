"""Files of a model that are truncated, overwritten, replaced and removed while it is served, and hostile
files of a tokenizer."""

import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from integration_tests.support.greedy_answers import Model
from integration_tests.support.service import launch
from integration_tests.support.steady_client import API, steady_client, wait_for_answers
from tests.support.processes import children_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "model.safetensors",
)
NEEDED = ("config.json", "model.safetensors")  # by a restarted shard
FLAGS = ["--dtype", "float32", *API]
Change = Callable[[Path], None]


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def overwrite(file: Path) -> None:
    """Overwrite in place: processes that have the file open or mapped see the new bytes."""
    with file.open("r+b") as content:
        content.write(b"\xff" * file.stat().st_size)


def replace(file: Path) -> None:
    other = file.with_name("other")
    other.write_bytes(b"\xff" * 100)
    other.rename(file)


def remove(file: Path) -> None:
    file.unlink()


CHANGES = [cut, overwrite, replace, remove]


@pytest.fixture
def directory(model: Model, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model.directory, tmp_path / "model"))


@pytest.mark.parametrize("change", CHANGES)
def test_changed_files_do_not_affect_running_shards(change: Change, directory: Path) -> None:
    service = launch(directory, *FLAGS).wait_until_serving()
    try:
        with steady_client(service.http) as seconds:
            for name in FILES:
                change(directory / name)
                wait_for_answers(seconds)
    finally:
        code = service.end()
    assert code == 0, service.output


@pytest.mark.parametrize("name", NEEDED)
@pytest.mark.parametrize("change", CHANGES)
def test_shards_that_cannot_start_again_end_with_the_file(
    change: Change, name: str, directory: Path, tmp_path: Path
) -> None:
    service = launch(directory, *FLAGS).wait_until_serving()
    change(directory / name)
    os.kill(children_of(service.process.pid)["serve"][0], signal.SIGKILL)
    code = service.process.wait(300)  # it is tried six times
    assert service.end() == code == 1
    assert "Traceback" not in service.output
    last = service.lines[-1]
    assert str(directory) in last, service.output
    assert name in last, service.output


def without_type(settings: dict[str, Any]) -> None:
    settings["model"]["type"] = "Nope"


def without_vocabulary(settings: dict[str, Any]) -> None:
    del settings["model"]["vocab"]


def with_large_ids(settings: dict[str, Any]) -> None:
    vocabulary = settings["model"]["vocab"]
    settings["model"]["vocab"] = {piece: i + 2**40 for piece, i in vocabulary.items()}


def with_strange_merges(settings: dict[str, Any]) -> None:
    settings["model"]["merges"].append(["no such piece", "nor this"])


def with_a_bad_regex(settings: dict[str, Any]) -> None:
    pattern = {"type": "Split", "pattern": {"Regex": "(["}, "behavior": "Isolated", "invert": False}
    settings["pre_tokenizer"] = pattern


HOSTILE_BYTES = {
    "empty": b"",
    "no text": b"\xff" * 100,
    "no object": b"[]",
    "nothing in it": b"{}",
    "deep": b"[" * 1_000_000,
    "cut": b'{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": ',
}
HOSTILE_SETTINGS = [without_type, without_vocabulary, with_large_ids, with_strange_merges, with_a_bad_regex]


@pytest.mark.parametrize("hostile", [*HOSTILE_BYTES, *HOSTILE_SETTINGS])
def test_hostile_tokenizers_end_the_start(
    hostile: str | Callable[[dict[str, Any]], None], directory: Path
) -> None:
    file = directory / "tokenizer.json"
    if isinstance(hostile, str):
        file.write_bytes(HOSTILE_BYTES[hostile])
    else:
        settings = json.loads(file.read_text())
        hostile(settings)
        file.write_text(json.dumps(settings))
    service = launch(directory, *FLAGS)
    code = service.process.wait(90)
    assert service.end() == code == 1
    assert "Traceback" not in service.output
    # Every process that reads it refuses it; any may be the first.
    assert re.match(r"error: (router|shard 0): .*tokenizer", service.lines[-1]), service.output
