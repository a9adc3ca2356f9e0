"""Resolves the options for soft prompts and LoRA adapters before any process starts: makes directories
absolute, and checks that every adapter to load at start-up exists."""

import os
from dataclasses import fields, replace
from pathlib import Path

from tgis.config.adapter_ids import is_adapter_id
from tgis.config.model import AdapterOptions
from tgis.errors import OperatorError
from tgis.hub import model_files
from tgis.hub.cache import ADAPTER_CONFIG, cache_entry, find_snapshot

ALLOWED = "use letters, digits, _, - and ., and / between parts; no part may begin with a dot"
_FORM = "use NAME=DIRECTORY for an adapter in a directory"


class AdapterOptionsError(OperatorError):
    """Error for an option of soft prompts or adapters that cannot be applied; its text is one line."""


def resolve_adapter_options(options: AdapterOptions, max_sequence_length: int, cache: Path) -> AdapterOptions:
    """Return the options for the shards, with absolute paths and `lora_adapters` as `name=directory` entries.

    Raises AdapterOptionsError and model_files.ModelNotFoundError."""
    length = options.max_prompt_prefix_length
    limit = max_sequence_length - 1
    if length is not None and length > limit:
        raise AdapterOptionsError(
            f"max_prompt_prefix_length ({length}) must be at most {limit}, one less than max_sequence_length"
        )
    adapters = [f"{name}={path}" for name, path in find_adapters(options.lora_adapters or "", cache).items()]
    given = AdapterOptions(**{f.name: getattr(options, f.name) for f in fields(AdapterOptions)})
    return replace(
        given,
        prefix_store_path=_make_absolute(options.prefix_store_path),
        adapter_cache=_make_absolute(options.adapter_cache),
        lora_adapters=",".join(adapters) or None,
    )


def find_adapters(text: str, cache: Path) -> dict[str, Path]:
    """Return the adapters' absolute directories by id.

    `text` is a comma-separated list of `NAME=DIRECTORY`, `HUB/ID` and `HUB/ID@REVISION`. Raises
    AdapterOptionsError and model_files.ModelNotFoundError."""
    directories: dict[str, Path] = {}
    for entry in filter(None, map(str.strip, text.split(","))):
        name, directory = _locate(entry, cache)
        if not is_adapter_id(name) or name != os.path.normpath(name):
            raise AdapterOptionsError(f"lora_adapters: {name!r} is not a valid id: {ALLOWED}")
        if name in directories:
            raise AdapterOptionsError(f"lora_adapters: {name} is given twice")
        _check_adapter(name, directory)
        directories[name] = directory
    return directories


def _locate(entry: str, cache: Path) -> tuple[str, Path]:
    """Return the entry's id and directory; the directory may not exist. Raises AdapterOptionsError."""
    name, equals, directory = (part.strip() for part in entry.partition("="))
    if equals:
        if not name or not directory:
            raise AdapterOptionsError(f"lora_adapters: {entry} lacks a name or a directory; {_FORM}")
        return name, Path(directory).absolute()
    name, _, revision = entry.partition("@")
    snapshot = find_snapshot(cache_entry(name, cache), revision or None)
    if not os.path.isdir(snapshot):
        raise AdapterOptionsError(f"lora_adapters: {entry} is not in the hub cache; {_FORM}")
    return name, snapshot.absolute()


def _check_adapter(name: str, directory: Path) -> None:
    if "," in str(directory):
        raise AdapterOptionsError(
            f"lora_adapters: {name}: the path {directory} contains a comma, which separates adapters"
        )
    if not os.path.isdir(directory):
        raise AdapterOptionsError(f"lora_adapters: {name}: there is no directory {directory}")
    if not (directory / ADAPTER_CONFIG).is_file():
        raise AdapterOptionsError(f"lora_adapters: {name}: {directory} has no {ADAPTER_CONFIG}")
    kind = model_files.read_json(directory, ADAPTER_CONFIG).get("peft_type")
    if kind != "LORA":
        raise AdapterOptionsError(
            f"lora_adapters: {name}: {directory} is not a LoRA adapter: its peft_type is {kind}"
        )


def _make_absolute(path: str | None) -> str | None:
    """Return the directory's absolute path; the directory may appear later. Raises AdapterOptionsError."""
    if not path:
        return None
    directory = Path(path).absolute()
    try:
        directory.is_dir()
    except OSError as error:  # for example, a name that is too long for a directory
        raise AdapterOptionsError(f"{directory} cannot be used: {error.strerror}") from error
    return str(directory)
