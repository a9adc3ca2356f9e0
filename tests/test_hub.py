"""Names to directories, and what a model's files say."""

import json
from pathlib import Path

import pytest

from tgis import hub


def write(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def snapshot(cache: Path, name: str, commit: str, reference: str | None = "main") -> Path:
    entry = cache / f"models--{name.replace('/', '--')}"
    write(entry / "snapshots" / commit / "config.json", {})
    if reference:
        (entry / "refs").mkdir(exist_ok=True)
        (entry / "refs" / reference).write_text(commit)
    return entry / "snapshots" / commit


def test_a_snapshot_of_the_cache(tmp_path: Path) -> None:
    main = snapshot(tmp_path, "org/model", "c0ffee")
    other = snapshot(tmp_path, "org/model", "beef", "v2")
    assert hub.resolve("org/model", None, tmp_path) == main
    assert hub.resolve("org/model", "v2", tmp_path) == other
    assert hub.resolve("org/model", "beef", tmp_path) == other
    with pytest.raises(hub.ModelNotFoundError, match="Config file not found in local cache"):
        hub.resolve("org/model", "v3", tmp_path)


def test_a_directory_with_or_without_a_slash_at_its_end(tmp_path: Path) -> None:
    write(tmp_path / "model" / "config.json", {})
    for name in (str(tmp_path / "model"), str(tmp_path / "model") + "/"):
        assert hub.resolve(name, None, tmp_path) == tmp_path / "model"


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(hub.ModelNotFoundError, match="Model nobody/nothing not found"):
        hub.resolve("nobody/nothing", None, tmp_path)
    with pytest.raises(hub.ModelNotFoundError, match=r"has no config\.json"):
        hub.resolve(str(tmp_path), None, tmp_path)


def test_cache_root() -> None:
    assert hub.cache_root("/a", "/b") == Path("/a")
    assert hub.cache_root(None, "/b") == Path("/b/hub")
    assert hub.cache_root(None, None) == Path.home() / ".cache/huggingface/hub"


def test_sequence_length_is_the_first_key_that_is_there() -> None:
    assert hub.max_sequence_length({"n_positions": 5, "max_position_embeddings": 7}) == 7
    assert hub.max_sequence_length({"seq_length": 9, "max_seq_len": None}) == 9
    assert hub.max_sequence_length({}) == 2048


def test_end_of_sequence_ids(tmp_path: Path) -> None:
    assert hub.eos_token_ids(tmp_path) == []
    write(tmp_path / "generation_config.json", {"eos_token_id": [5, 6]})
    assert hub.eos_token_ids(tmp_path) == [5, 6]
    write(tmp_path / "config.json", {"eos_token_id": 0})
    assert hub.eos_token_ids(tmp_path) == [0]


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(hub.ModelNotFoundError, match=r"config\.json is not valid JSON"):
        hub.read_json(tmp_path, "config.json")
