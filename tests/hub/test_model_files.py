"""Names to directories, and what a model's files say."""

import json
import os
from itertools import permutations
from pathlib import Path

import pytest
from safetensors import SafetensorError, safe_open

from tgis.hub import model_files

UNRESOLVED = "^Failed to resolve config path: "


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
    assert model_files.resolve("org/model", None, tmp_path) == main
    assert model_files.resolve("org/model/", None, tmp_path) == main
    assert model_files.resolve("org/model", "v2", tmp_path) == other
    assert model_files.resolve("org/model", "beef", tmp_path) == other
    text = UNRESOLVED + "Config file not found in local cache for model org/model, revision v3$"
    with pytest.raises(model_files.ModelNotFoundError, match=text):
        model_files.resolve("org/model", "v3", tmp_path)


def test_a_directory_with_or_without_a_slash_at_its_end(tmp_path: Path) -> None:
    write(tmp_path / "model" / "config.json", {})
    for name in (str(tmp_path / "model"), str(tmp_path / "model") + "/"):
        assert model_files.resolve(name, None, tmp_path) == tmp_path / "model"


def test_the_cache_goes_before_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "org" / "model" / "config.json", {})
    assert model_files.resolve("org/model", None, tmp_path / "cache") == Path("org/model")
    main = snapshot(tmp_path / "cache", "org/model", "c0ffee")
    assert model_files.resolve("org/model", None, tmp_path / "cache") == main


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(model_files.ModelNotFoundError, match=UNRESOLVED + "Model nobody/nothing not found$"):
        model_files.resolve("nobody/nothing", None, tmp_path)
    with pytest.raises(model_files.ModelNotFoundError, match=UNRESOLVED + r".* has no config\.json$"):
        model_files.resolve(str(tmp_path), None, tmp_path)


def test_names_that_are_too_long(tmp_path: Path) -> None:
    """For a file; the path to a directory may be longer than that."""
    directory = tmp_path / ("x" * 150) / ("y" * 150)
    write(directory / "config.json", {})
    assert model_files.resolve(str(directory), None, tmp_path) == directory
    for name in ("z" * 300, f"/{'z' * 300}", "z" * 5000):
        text = UNRESOLVED + f"Model {name[:200]} not found: File name too long$"
        with pytest.raises(model_files.ModelNotFoundError, match=text):
            model_files.resolve(name, None, tmp_path)
        with pytest.raises(
            model_files.ModelNotFoundError, match=r"^Weights not found in local cache for model "
        ):
            model_files.find_files(name, None, tmp_path)
    snapshot(tmp_path, "org/m", "c0ffee")
    with pytest.raises(
        model_files.ModelNotFoundError, match=UNRESOLVED + "Config file not found in local cache"
    ):
        model_files.resolve("org/m", "r" * 300, tmp_path)


def test_a_path_that_is_not_utf8(tmp_path: Path) -> None:
    """The libraries that read models refuse it, each in its own words and later."""
    directory = tmp_path / os.fsdecode(b"caf\xe9")
    write(directory / "config.json", {})
    with pytest.raises(
        model_files.ModelNotFoundError, match=UNRESOLVED + "the path .* is not UTF-8, as safetensors"
    ):
        model_files.resolve(str(directory), None, tmp_path)
    weights = directory / "model.safetensors"
    weights.write_bytes(b"\2\0\0\0\0\0\0\0{}")
    with pytest.raises(SafetensorError, match="is not valid UTF-8"):
        safe_open(weights, "pt").__enter__()


def test_cache_root() -> None:
    rest = {"hf_home": "/b", "home": "/home/x"}
    assert model_files.cache_root("/a", **rest) == Path("/a")
    assert model_files.cache_root(transformers_cache="/a", **rest) == Path("/a")
    assert model_files.cache_root(huggingface_hub_cache="/a", **rest) == Path("/a")
    assert model_files.cache_root("", **rest) == Path("/b/hub")
    assert model_files.cache_root(home="/home/x") == Path("/home/x/.cache/huggingface/hub")
    assert model_files.cache_root() == Path()


def test_variables_of_the_cache_must_agree() -> None:
    assert model_files.cache_root("/a", "/a", "/a") == Path("/a")
    names = ["HF_HUB_CACHE", "TRANSFORMERS_CACHE", "HUGGINGFACE_HUB_CACHE"]
    for first, second in permutations(names, 2):
        values = {name.lower(): {first: "/a", second: "/b"}.get(name) for name in names}
        with pytest.raises(model_files.CacheConflictError) as error:
            model_files.cache_root(**values)
        older, other = sorted((first, second), key=names.index, reverse=True)
        assert str(error.value) == f"{older} and {other} env vars can't be set to different values"


def test_sequence_length_is_the_first_key_that_is_there() -> None:
    keys = "max_position_embeddings n_positions max_seq_len seq_length".split()
    keys += "max_sequence_length max_seq_length seq_len".split()
    for index, key in enumerate(keys):
        assert (
            model_files.max_sequence_length({name: 100 + keys.index(name) for name in keys[index:]})
            == 100 + index
        )
        assert model_files.length_of_model({key: 7}) == 7
    assert model_files.max_sequence_length({"seq_length": 9, "max_seq_len": None}) == 9
    for odd in (True, "8", 8.5, 0, -1):
        assert model_files.length_of_model({"n_positions": odd}) is None
    assert model_files.length_of_model({"text_config": {"n_positions": 5}}) is None
    assert model_files.max_sequence_length({}) == 2048


def test_end_of_sequence_ids(tmp_path: Path) -> None:
    assert model_files.eos_token_ids(tmp_path) == []
    write(tmp_path / "generation_config.json", {"eos_token_id": [5, 6]})
    assert model_files.eos_token_ids(tmp_path) == [5, 6]
    write(tmp_path / "config.json", {"eos_token_id": 0})
    assert model_files.eos_token_ids(tmp_path) == [0]


def test_the_pad_token(tmp_path: Path) -> None:
    """Of the first place that names a token of the model."""
    model, tokenizer = tmp_path / "model", tmp_path / "tokenizer"
    added = [{"id": 7, "content": "<pad>"}, {"id": 8, "content": "<fill>"}, {"id": 200, "content": "<far>"}]

    def find(**files: object) -> int:
        for directory, names in ((model, ("config", "generation_config")), (tokenizer, None)):
            for path in directory.glob("*"):
                path.unlink()
            for name in names or files.keys() - {"config", "generation_config"}:
                write(directory / f"{name}.json", files.get(name, {}))
        return model_files.pad_token_id(model, tokenizer, 100)

    named = {"tokenizer_config": {"pad_token": "<pad>"}, "tokenizer": {"added_tokens": added}}
    assert find(config={"pad_token_id": 3}, generation_config={"pad_token_id": 4}, **named) == 3
    assert find(config={"text_config": {"pad_token_id": 3}}, generation_config={"pad_token_id": 4}) == 3
    for odd in (-1, 100, "3", None, True, [3]):
        assert find(config={"pad_token_id": odd}, generation_config={"pad_token_id": 4}, **named) == 4
    assert find(config={"eos_token_id": 5}, **named) == 7
    named["tokenizer_config"] = {"pad_token": {"content": "<fill>", "lstrip": False}}
    assert find(config={"eos_token_id": 5}, **named) == 8
    named["special_tokens_map"], named["tokenizer_config"] = {"pad_token": "<pad>"}, {}
    assert find(config={"eos_token_id": 5}, **named) == 7
    named["special_tokens_map"] = {"pad_token": "<far>"}
    assert find(config={"eos_token_id": [5, 6]}, **named) == 5
    assert find(config={"eos_token_id": 5}, tokenizer_config={"pad_token": "<pad>"}) == 5
    assert find(config={"eos_token_id": -5}) == 0


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"", "is not valid JSON"),
        (b"{", "is not valid JSON"),
        (b'{"a": "\xff"}', "is not valid JSON"),
        (b"[1]", "does not hold an object"),
        (b'{"a":' * 10**5, "is nested too deep"),
        (b'{"a":' + b"[" * 10**5 + b"]" * 10**5 + b"}", "is nested too deep"),
    ],
    ids=range(6),
)
def test_a_broken_file_is_named(tmp_path: Path, content: bytes, fault: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(model_files.ModelNotFoundError, match=rf"config\.json {fault}"):
        model_files.read_json(tmp_path, "config.json")


def test_fingerprints_tell_models_apart(tmp_path: Path) -> None:
    """By settings and sizes of weights; what else lies there does not count."""
    found = []
    for size, settings in ((2, {"a": 1}), (2, {"a": 2}), (3, {"a": 1}), (2, {"a": 1})):
        write(tmp_path / "config.json", settings)
        (tmp_path / "model.safetensors").write_bytes(bytes(size))
        (tmp_path / "README.md").write_text(f"{len(found)}")
        found.append(model_files.fingerprint(tmp_path))
    assert found[0] == found[3]
    assert len(set(found)) == 3
