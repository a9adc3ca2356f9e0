"""From a model's name to the directory that holds it, and what its JSON files say. Never touches the
network."""

import json
from pathlib import Path
from typing import Any

from tgis.errors import OperatorError

# The first of these that a configuration has is the model's sequence length.
LENGTH_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)
DEFAULT_LENGTH = 2048


class ModelNotFoundError(OperatorError):
    """The name leads to no usable model; the text says why in one line."""


def cache_root(hf_hub_cache: str | None, hf_home: str | None) -> Path:
    if hf_hub_cache:
        return Path(hf_hub_cache)
    return (Path(hf_home) if hf_home else Path.home() / ".cache" / "huggingface") / "hub"


def resolve(name: str, revision: str | None, cache: Path) -> Path:
    """The directory of `name`: its snapshot in the hub cache, or the directory of that name.

    A snapshot goes before a directory, as in TGIS. Raises ModelNotFoundError."""
    entry = cache / f"models--{name.replace('/', '--')}"
    if entry.is_dir():
        reference = entry / "refs" / (revision or "main")
        commit = reference.read_text().strip() if reference.is_file() else revision or "main"
        directory = entry / "snapshots" / commit
        if not (directory / "config.json").is_file():
            text = f"Config file not found in local cache for model {name}, revision {commit}"
            raise ModelNotFoundError(text)
        return directory
    directory = Path(name)
    if not directory.is_dir():
        raise ModelNotFoundError(f"Model {name} not found")
    if not (directory / "config.json").is_file():
        raise ModelNotFoundError(f"Model {name} has no config.json")
    return directory


def read_json(directory: Path, name: str) -> dict[str, Any]:
    """The object in a file of the model; empty where there is no such file. Raises ModelNotFoundError."""
    path = directory / name
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelNotFoundError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelNotFoundError(f"{path} does not hold an object")
    return content


def max_sequence_length(config: dict[str, Any]) -> int:
    """What config.json says, else 2048."""
    return next((config[key] for key in LENGTH_KEYS if isinstance(config.get(key), int)), DEFAULT_LENGTH)


def eos_token_ids(directory: Path) -> list[int]:
    """Of config.json, else of generation_config.json, else none; one id or several."""
    for name in ("config.json", "generation_config.json"):
        ids = read_json(directory, name).get("eos_token_id")
        if ids is not None:
            return ids if isinstance(ids, list) else [ids]
    return []
