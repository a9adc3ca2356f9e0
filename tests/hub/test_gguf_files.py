"""The GGUF files of a model's name, and their refusal by commands that do not read them."""

import shlex
import threading
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from tgis.cli import models
from tgis.cli.main import main
from tgis.cli.quantize import quantize
from tgis.hub.gguf_files import (
    find_gguf,
    find_named_place,
    refuse_gguf,
    refuse_gguf_on_hub,
    split_set,
    wait_for_tokenizer,
)
from tgis.hub.model_files import ModelNotFoundError

NAME = "small-q4.gguf"
PARTS = [f"large-0000{number}-of-00003.gguf" for number in (1, 2, 3)]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "a model").mkdir()
    file = tmp_path / "a model" / NAME
    file.write_bytes(b"GGUF\x03\0\0\0")
    return file


def find(name: object, tmp_path: Path) -> list[Path] | None:
    return find_gguf(str(name), None, tmp_path / "cache")


def test_a_written_directory_is_named_by_its_file(file: Path, tmp_path: Path) -> None:
    written, snapshot = tmp_path / "written", tmp_path / "snapshot"
    for directory, target in ((written, file), (snapshot, Path("..") / "a model" / NAME)):
        directory.mkdir()
        (directory / NAME).symlink_to(target)
    assert find_named_place(written) == file
    assert find_named_place(snapshot) == snapshot, "the hub cache has relative links"
    assert find_named_place(file.parent) == file.parent
    assert find_named_place(tmp_path / "missing") == tmp_path / "missing"


def test_a_file_and_a_directory_with_one(file: Path, tmp_path: Path) -> None:
    (file.parent / "config.json").write_text("{}")
    (file.parent / "mmproj-model-f16.gguf").touch()
    assert (
        find(file, tmp_path)
        == find(file.parent, tmp_path)
        == find(f"{file.parent}:{NAME}", tmp_path)
        == [file]
    )


def test_a_file_with_another_name(file: Path, tmp_path: Path) -> None:
    other = file.rename(file.with_name("weights"))
    assert find(other, tmp_path) == [other]
    other.write_bytes(b"else")
    assert find(other, tmp_path) is None
    assert find("x" * 9999, tmp_path) is None
    assert find("org/none", tmp_path) is None


def test_other_weights_beside_it_are_served(file: Path, tmp_path: Path) -> None:
    (file.parent / "model.safetensors").touch()
    assert find(file.parent, tmp_path) is None
    assert find(file, tmp_path) == [file]


def test_a_split_set(tmp_path: Path) -> None:
    files = [tmp_path / name for name in PARTS]
    for each in files:
        each.touch()
    for name in (tmp_path, *files):
        assert find(name, tmp_path) == files
    files[1].unlink()
    for name in (tmp_path, files[0]):
        with pytest.raises(
            ModelNotFoundError, match=f"large-00001-of-00003.gguf is a part of 3: {PARTS[1]} is missing"
        ):
            find(name, tmp_path)


def test_several_models_of_a_directory(file: Path, tmp_path: Path) -> None:
    (file.parent / "small-q8.gguf").touch()
    with pytest.raises(
        ModelNotFoundError, match=f"has several GGUF files; select one of them: {NAME}, small-q8.gguf"
    ):
        find(file.parent, tmp_path)


def test_a_file_of_the_hub(file: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "cache" / "models--org--small" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("abc")
    placed = file.rename(snapshot / NAME)
    assert find("org/small", tmp_path) == find(f"org/small:{NAME}", tmp_path) == [placed]
    for name in ("other.gguf", "../abc/small-q4.gguf"):
        with pytest.raises(ModelNotFoundError, match="is not among the downloaded files of org/small; "):
            find(f"org/small:{name}", tmp_path)


def test_names_of_a_split_set() -> None:
    assert split_set(NAME) == [NAME]
    assert split_set(PARTS[1]) == PARTS


def test_refusals_name_the_command_that_converts(file: Path) -> None:
    for place in (file, file.parent):
        with pytest.raises(ModelNotFoundError) as caught:
            refuse_gguf(place)
        check(str(caught.value), file)
    refuse_gguf(Path("x" * 9999))


def check(text: str, file: Path) -> None:
    """Check that a text is one line that ends with one of our commands for the file."""
    assert "\n" not in text
    before, _, command = text.partition(" is a GGUF file, which this command does not read; convert it: ")
    assert before.endswith(str(file))
    program, name, *arguments = shlex.split(command)
    assert program == "text-generation-server"
    assert name in main.commands
    assert arguments == [str(file), "DIRECTORY"]


def test_models_of_the_hub() -> None:
    with pytest.raises(ModelNotFoundError, match=f"by its name, org/small:{NAME}, or all: --extension .gguf"):
        refuse_gguf_on_hub("org/small", ["README.md", "small-q8.gguf", NAME])
    refuse_gguf_on_hub("org/small", [NAME, "model.safetensors"])
    refuse_gguf_on_hub("org/small", ["config.json"])


@pytest.mark.parametrize(
    ("command", "more"),
    [(models.download_weights, []), (quantize, ["out"]), (models.convert_to_fast_tokenizer, [])],
)
def test_commands(command: click.Command, more: list[str], file: Path, tmp_path: Path) -> None:
    env = {"HF_HUB_CACHE": str(tmp_path)}
    for place in (file, file.parent) if more or command is models.convert_to_fast_tokenizer else (file,):
        result = CliRunner().invoke(command, [str(place), *more], env=env)
        assert result.exit_code == 1
        check(result.stderr.splitlines()[-1], file)


def test_a_tokenizer_is_awaited_while_it_is_written(tmp_path: Path) -> None:
    wait_for_tokenizer(tmp_path)
    unfinished = tmp_path / "unfinished-gguf-tokenizer.json"
    unfinished.touch()
    finished = tmp_path / "tokenizer.json"
    timer = threading.Timer(0.05, unfinished.rename, (finished,))
    timer.start()
    wait_for_tokenizer(tmp_path)
    assert finished.exists()
    timer.join()


def test_a_file_of_an_interrupted_download_is_not_awaited(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json.part").touch()
    waiter = threading.Thread(target=wait_for_tokenizer, args=(tmp_path,), daemon=True)
    waiter.start()
    waiter.join(10)
    assert not waiter.is_alive()
