"""Ids name directories below the root, and no other file is ever opened."""

import errno
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.hostile_ids import HOSTILE, write_ways_out
from tests.support.prompt_files import REQUIRED, age, random_prompt, save_prompt
from tgis.prompts.artifact_cache import ArtifactCache, Kind
from tgis.prompts.errors import AdapterError, AdapterNotFoundError
from tgis.prompts.ids import find_directory, missing_as_not_found
from tgis.prompts.store import AdapterStore

GOOD = [
    "a",
    "nested/path",
    "nested//path",
    "nested/path/",
    "v1.2-rc_3",
    "-x",
    "a.b/c.d",
    "x..y",
    "N" * 120 + "/" + "o" * 120,
]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root, outside = tmp_path / "root", tmp_path / "outside"
    for name in GOOD:
        save_prompt(root / name, random_prompt())
    (root / "link_in").symlink_to("nested/path")
    (root / "link_in_far").symlink_to(root / "nested")
    write_ways_out(root, outside, outside)
    return root


@pytest.fixture(scope="module")
def opened_by_threads() -> dict[int, list[str]]:
    """Record the files that a thread opens here. The hook stays for the life of the process."""
    opened: dict[int, list[str]] = {}

    def note(event: str, arguments: tuple[object, ...]) -> None:
        if event == "open" and (files := opened.get(threading.get_ident())) is not None:
            files.extend(os.fsdecode(file) for file in arguments[:1] if isinstance(file, str | bytes))

    sys.addaudithook(note)
    return opened


@pytest.fixture
def opened(opened_by_threads: dict[int, list[str]]) -> Iterator[list[str]]:
    yield opened_by_threads.setdefault(threading.get_ident(), [])
    del opened_by_threads[threading.get_ident()]


def open_store(root: Path | None, tmp_path: Path) -> AdapterStore:
    return AdapterStore(ArtifactCache(tmp_path / "artifacts"), REQUIRED, root, root, {})


def refuse(store: AdapterStore, kind: Kind, id: str) -> str:
    with pytest.raises(AdapterError) as caught:
        store.find(kind, id)
    text = str(caught.value)
    assert text.isprintable()
    assert len(text) < 1100
    return text


def test_hostile_ids(root: Path, tmp_path: Path, opened: list[str]) -> None:
    store = open_store(root, tmp_path)
    for pattern in HOSTILE:
        id = pattern.replace("{outside}", str(tmp_path / "outside")).replace("{root}", str(root))
        shown = refuse(store, "prompt", "missing").replace("missing", "{}")
        text = refuse(store, "prompt", id)
        start, end = shown.split("{}")[0], shown.split("{}")[2]
        assert text.startswith(start)
        assert text.endswith(end)
        text = refuse(store, "adapter", id)
        if "decoder" not in id and id not in ("empty",):
            assert "does not exist" in text or text.startswith("Invalid adapter id '")
    assert len(HOSTILE) > 40
    mine = [tmp_path / "root", tmp_path / "artifacts"]
    for file in opened:
        assert any(Path(os.path.realpath(file)).is_relative_to(path) for path in mine), file


def test_the_audit_hook_sees_opened_files(root: Path, tmp_path: Path, opened: list[str]) -> None:
    open_store(root, tmp_path).find("prompt", "a")
    assert str(root / "a" / "decoder.pt") in opened
    (root / "link_to_file_out").read_bytes()
    assert str(root / "link_to_file_out") in opened


@pytest.mark.parametrize("id", [*GOOD, "link_in", "link_in_far/path"])
def test_good_ids(id: str, root: Path, tmp_path: Path) -> None:
    assert open_store(root, tmp_path).find("prompt", id).num_decoder_tokens == 4


def test_the_root_may_be_a_link_or_relative(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to(root)
    monkeypatch.chdir(tmp_path)
    stores = [
        open_store(path, tmp_path) for path in (tmp_path / "link", Path("link"), Path("./root/../root"))
    ]
    monkeypatch.chdir("/")
    for store in stores:
        assert store.find("prompt", "link_in").num_decoder_tokens == 4
        refuse(store, "prompt", "link_out")


def test_a_root_beside_one_of_a_longer_name(tmp_path: Path) -> None:
    save_prompt(tmp_path / "root-2", random_prompt())
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "a").symlink_to(tmp_path / "root-2")
    with pytest.raises(AdapterNotFoundError):
        find_directory(tmp_path / "root", "a")


def test_kubernetes_volume_links_are_followed(tmp_path: Path) -> None:
    """A linked directory, with links to files in it, is swapped as a whole."""
    root, store = tmp_path / "root", open_store(tmp_path / "root", tmp_path)
    for version, num_tokens in (("..2026_1", 2), ("..2026_2", 3)):
        save_prompt(root / version, random_prompt(num_tokens))
        save_prompt(root / version / "sub", random_prompt(num_tokens + 2))
    (root / "prompt").mkdir()
    (root / "prompt" / "decoder.pt").symlink_to("../..data/decoder.pt")
    (root / "sub").symlink_to("..data/sub")
    for version, num_tokens in (("..2026_1", 2), ("..2026_2", 3)):
        (root / "..data_tmp").symlink_to(version)
        (root / "..data_tmp").rename(root / "..data")
        age(root / version)
        assert store.find("prompt", "prompt").num_decoder_tokens == num_tokens
        assert store.find("prompt", "sub").num_decoder_tokens == num_tokens + 2
    refuse(store, "prompt", "..data")


@pytest.mark.parametrize("root_name", [None, "nothing", "file"])
def test_no_store(root_name: str | None, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    store = open_store(tmp_path / root_name if root_name else None, tmp_path)
    text = "can't retrieve prompt prefix with id 'a': prefix id \"a\" not found"
    assert refuse(store, "prompt", "a") == text
    expected = "can't retrieve adapter with id 'a': directory does not exist"
    none = "adapter_id supplied but no adapter store was configured"
    assert refuse(store, "adapter", "a") == (expected if root_name else none)


def test_files_without_read_permission_are_absent_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    for error in (PermissionError(errno.EACCES, "no", "a"), FileNotFoundError(errno.ENOENT, "no", "b")):
        with pytest.raises(AdapterNotFoundError), missing_as_not_found():
            raise error
    assert [record.getMessage() for record in caplog.records] == ["a cannot be read: no"]
    with pytest.raises(OSError, match="broken"), missing_as_not_found():
        raise OSError(errno.EIO, "broken")


def test_adapter_ids(root: Path, tmp_path: Path) -> None:
    store = open_store(root, tmp_path)
    rule = "must contain only alphanumeric, _ and - and /"
    for id, shown in (("a b", "a b"), ("", ""), ("a\n", r"a\n"), ("é" * 300, "é" * 256 + "...")):
        assert refuse(store, "adapter", id) == f"Invalid adapter id '{shown}', {rule}"
    for id in ("..", "../outside", "/etc", "a.swp", "x" * 256, "missing"):
        assert (
            refuse(store, "adapter", id) == f"can't retrieve adapter with id '{id}': directory does not exist"
        )
    text = "can't retrieve adapter with id 'a': invalid adapter: no adapter_config.json found"
    assert refuse(store, "adapter", "a") == text
