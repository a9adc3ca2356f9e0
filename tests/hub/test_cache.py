"""Resolution of models' names to directories, in the hub cache and elsewhere."""

import json
import os
from itertools import permutations
from pathlib import Path

import pytest
from safetensors import SafetensorError, safe_open

from tgis.hub import cache
from tgis.hub.model_files import ModelNotFoundError

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
    assert cache.find_model("org/model", None, tmp_path) == main
    assert cache.find_model("org/model/", None, tmp_path) == main
    assert cache.find_model("org/model", "v2", tmp_path) == other
    assert cache.find_model("org/model", "beef", tmp_path) == other
    text = UNRESOLVED + "Config file not found in local cache for model org/model, revision v3$"
    with pytest.raises(ModelNotFoundError, match=text):
        cache.find_model("org/model", "v3", tmp_path)


def test_a_directory_with_or_without_a_slash_at_its_end(tmp_path: Path) -> None:
    write(tmp_path / "model" / "config.json", {})
    for name in (str(tmp_path / "model"), str(tmp_path / "model") + "/"):
        assert cache.find_model(name, None, tmp_path) == tmp_path / "model"


def test_the_cache_goes_before_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "org" / "model" / "config.json", {})
    assert cache.find_model("org/model", None, tmp_path / "cache") == Path("org/model")
    main = snapshot(tmp_path / "cache", "org/model", "c0ffee")
    assert cache.find_model("org/model", None, tmp_path / "cache") == main


def fail(name: str, tmp_path: Path) -> str:
    """Return the error about a name without what all of them begin with."""
    with pytest.raises(ModelNotFoundError) as caught:
        cache.find_model(name, None, tmp_path / "cache")
    return str(caught.value).removeprefix(f"Failed to resolve config path: Model {name} ")


def test_a_name_without_a_model_is_answered_with_advice(tmp_path: Path) -> None:
    forms = "; name a model's directory, a GGUF file, or an id in the hub cache"
    text = f"not found: it is neither a directory nor in the hub cache {tmp_path}/cache; download it from "
    text += "the hub with `text-generation-server download-weights nobody/nothing`"
    assert fail("nobody/nothing", tmp_path) == text
    assert fail(f"{tmp_path}/none", tmp_path) == f"not found{forms}"
    assert fail("", tmp_path) == f"not found{forms}"
    (tmp_path / "file").touch()
    assert fail(f"{tmp_path}/file", tmp_path) == f"is a file, but not a GGUF file{forms}"
    text = "has no config.json; name the directory with the files of a model"
    assert fail(str(tmp_path), tmp_path) == text


@pytest.mark.parametrize(
    ("config", "base"), [({"base_model_name_or_path": "org/m"}, "org/m"), ({}, "(not named)")]
)
def test_an_adapter_in_place_of_a_model(config: object, base: str, tmp_path: Path) -> None:
    write(tmp_path / "adapter_config.json", config)
    text = f"is an adapter or a soft prompt; serve its base model {base}, with the adapter in "
    text += "--lora-adapters or in the directory of --prefix-store-path"
    assert fail(str(tmp_path), tmp_path) == text


def test_a_directory_that_this_user_cannot_read(tmp_path: Path) -> None:
    write(tmp_path / "model" / "config.json", {})
    (tmp_path / "model").chmod(0)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)  # root may read everything
    try:
        text = fail(str(tmp_path / "model"), tmp_path)
    finally:
        os.seteuid(user)
        (tmp_path / "model").chmod(0o700)
    text_of_advice = "let this user read the directory and its files"
    assert text == f"cannot be read: Permission denied; {text_of_advice}"


def test_names_that_are_too_long(tmp_path: Path) -> None:
    """The name is too long for a file; the path of a directory may be longer."""
    directory = tmp_path / ("x" * 150) / ("y" * 150)
    write(directory / "config.json", {})
    assert cache.find_model(str(directory), None, tmp_path) == directory
    for name in ("z" * 300, f"/{'z' * 300}", "z" * 5000):
        text = UNRESOLVED + f"Model {name[:200]} not found: File name too long$"
        with pytest.raises(ModelNotFoundError, match=text):
            cache.find_model(name, None, tmp_path)
        with pytest.raises(ModelNotFoundError, match=r"^Weights not found in local cache for model "):
            cache.find_model_files(name, None, tmp_path)
    snapshot(tmp_path, "org/m", "c0ffee")
    with pytest.raises(ModelNotFoundError, match=UNRESOLVED + "Config file not found in local cache"):
        cache.find_model("org/m", "r" * 300, tmp_path)


def test_a_path_that_is_not_utf8(tmp_path: Path) -> None:
    """The libraries that read models refuse such a path later, each with a different error."""
    directory = tmp_path / os.fsdecode(b"caf\xe9")
    write(directory / "config.json", {})
    with pytest.raises(ModelNotFoundError, match=UNRESOLVED + "the path .* is not UTF-8, which safetensors"):
        cache.find_model(str(directory), None, tmp_path)
    weights = directory / "model.safetensors"
    weights.write_bytes(b"\2\0\0\0\0\0\0\0{}")
    with pytest.raises(SafetensorError, match="is not valid UTF-8"):
        safe_open(weights, "pt").__enter__()


def test_cache_root() -> None:
    rest = {"hf_home": "/b", "home": "/home/x"}
    assert cache.cache_root("/a", **rest) == Path("/a")
    assert cache.cache_root(transformers_cache="/a", **rest) == Path("/a")
    assert cache.cache_root(huggingface_hub_cache="/a", **rest) == Path("/a")
    assert cache.cache_root("", **rest) == Path("/b/hub")
    assert cache.cache_root(home="/home/x") == Path("/home/x/.cache/huggingface/hub")
    assert cache.cache_root() == Path()


def test_variables_of_the_cache_must_agree() -> None:
    assert cache.cache_root("/a", "/a", "/a") == Path("/a")
    names = ["HF_HUB_CACHE", "TRANSFORMERS_CACHE", "HUGGINGFACE_HUB_CACHE"]
    for first, second in permutations(names, 2):
        values = {name.lower(): {first: "/a", second: "/b"}.get(name) for name in names}
        with pytest.raises(cache.CacheConflictError) as error:
            cache.cache_root(**values)
        older, other = sorted((first, second), key=names.index, reverse=True)
        assert str(error.value) == f"{older} and {other} env vars can't be set to different values"
