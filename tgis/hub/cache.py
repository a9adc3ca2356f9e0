"""Locates models in the local cache of a model hub or in directories, without using the network."""

import os
import re
from pathlib import Path
from typing import NoReturn

from tgis.errors import OperatorError
from tgis.hub.model_files import ModelNotFoundError, read_json

UNRESOLVED = "Failed to resolve config path"
MAX_SHOWN_CHARS = 200  # of a model's name in an error
HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?(:\w[\w.-]*\.gguf)?")
FORMS = "a model's directory, a GGUF file, or an id in the hub cache"
ADAPTER_CONFIG = "adapter_config.json"
"""File in the directory of an adapter or a soft prompt."""


class CacheConflictError(OperatorError):
    """Error for two variables that name different caches."""


def cache_root(
    hf_hub_cache: str | None = None,
    transformers_cache: str | None = None,
    huggingface_hub_cache: str | None = None,
    hf_home: str | None = None,
    home: str | None = None,
) -> Path:
    """Return the directory in which the hub's libraries keep models, given these variables.

    An empty variable counts as unset. Raises CacheConflictError if the first three differ."""
    source = "HF_HUB_CACHE"
    value = hf_hub_cache
    older = {"TRANSFORMERS_CACHE": transformers_cache, "HUGGINGFACE_HUB_CACHE": huggingface_hub_cache}
    for name, other in older.items():
        if other and value and other != value:
            raise CacheConflictError(f"{name} and {source} env vars can't be set to different values")
        if other and not value:
            source = name
            value = other
    if value:
        return Path(value)
    if hf_home:
        return Path(hf_home) / "hub"
    return Path(home) / ".cache" / "huggingface" / "hub" if home else Path()


def find_model(name: str, revision: str | None, cache: Path) -> Path:
    """Return the model's snapshot in the hub cache or else, as in TGIS, the directory of that name.

    Raises ModelNotFoundError."""
    entry = cache_entry(name, cache)
    directory = find_snapshot(entry, revision) if os.path.isdir(entry) else _directory(name, cache)
    if not os.path.isfile(directory / "config.json"):
        raise ModelNotFoundError(
            f"{UNRESOLVED}: Config file not found in local cache for model {name}, revision {directory.name}"
        )
    if not is_utf8(directory):
        raise ModelNotFoundError(
            f"{UNRESOLVED}: the path {directory} is not UTF-8, which safetensors and tokenizers require"
        )
    return directory


def is_utf8(path: object) -> bool:
    """Return True if a path is valid UTF-8 on disk."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return False
    return True


def find_model_files(name: str, revision: str | None, cache: Path) -> Path:
    """Return the model's directory like `find_model`, but allow missing files. Raises ModelNotFoundError."""
    entry = cache_entry(name, cache)
    directory = find_snapshot(entry, revision) if os.path.isdir(entry) else Path(name)
    if not name or not os.path.isdir(directory):
        raise ModelNotFoundError(f"Weights not found in local cache for model {name[:MAX_SHOWN_CHARS]}")
    return directory


def cache_entry(name: str, cache: Path) -> Path:
    """Return the model's directory in the hub cache, which may not exist."""
    return cache / f"models--{name.rstrip('/').replace('/', '--')}"


def find_snapshot(entry: Path, revision: str | None) -> Path:
    """Return the directory of a revision, `main` by default; it may not exist."""
    reference = entry / "refs" / (revision or "main")
    commit = reference.read_text().strip() if os.path.isfile(reference) else revision or "main"
    return entry / "snapshots" / commit


def _directory(name: str, cache: Path) -> Path:
    directory = Path(name)
    shown = name[:MAX_SHOWN_CHARS]
    try:
        if not name or not directory.is_dir():
            _refuse_absent(name, shown, cache)
        if not (directory / "config.json").is_file():
            _refuse_without_config(directory, shown)
    except PermissionError as error:
        raise ModelNotFoundError(
            f"{UNRESOLVED}: Model {shown} cannot be read: {error.strerror}; let this user read the directory "
            "and its files"
        ) from error
    except OSError as error:
        raise ModelNotFoundError(f"{UNRESOLVED}: Model {shown} not found: {error.strerror}") from error
    return directory


def _refuse_absent(name: str, shown: str, cache: Path) -> NoReturn:
    """Raise ModelNotFoundError for a name that is no directory."""
    if name and Path(name).exists():
        raise ModelNotFoundError(f"{UNRESOLVED}: Model {shown} is a file, but not a GGUF file; name {FORMS}")
    if not HUB_ID.fullmatch(name):
        raise ModelNotFoundError(f"{UNRESOLVED}: Model {shown} not found; name {FORMS}")
    raise ModelNotFoundError(
        f"{UNRESOLVED}: Model {shown} not found: it is neither a directory nor in the hub cache {cache}; "
        f"download it from the hub with `text-generation-server download-weights {name}`"
    )


def _refuse_without_config(directory: Path, shown: str) -> NoReturn:
    """Raise ModelNotFoundError for a directory without config.json."""
    if not (directory / ADAPTER_CONFIG).is_file():
        raise ModelNotFoundError(
            f"{UNRESOLVED}: Model {shown} has no config.json; name the directory with the files of a model"
        )
    base = read_json(directory, ADAPTER_CONFIG).get("base_model_name_or_path") or "(not named)"
    raise ModelNotFoundError(
        f"{UNRESOLVED}: Model {shown} is an adapter or a soft prompt; serve its base model {base}, with the "
        "adapter in --lora-adapters or in the directory of --prefix-store-path"
    )
