"""Locates the GGUF files of a model, which is named by a file, a directory or `HUB/ID:FILE`."""

import os
import re
import shlex
import time
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

from tgis.hub.cache import cache_entry, find_snapshot
from tgis.hub.model_files import OTHER_WEIGHT_FILES, ModelNotFoundError

SUFFIX = ".gguf"
MAGIC = b"GGUF"
PROJECTOR = "mmproj"  # prefix of files with the part of a model that reads images
COMMAND = "text-generation-server convert-to-safetensors"
PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
MAX_SHOWN = 5
TOKENIZER = "tokenizer.json"
UNFINISHED_TOKENIZER = "unfinished-gguf-tokenizer.json"
"""Name of a GGUF model's tokenizer while it is being written, which takes seconds for a large vocabulary.
Meanwhile, the processes that serve the model start. No downloading program uses this name for its files."""
POLL_S = 0.02


def find_gguf(name: str, revision: str | None, cache: Path) -> list[Path] | None:
    """Return the files of a GGUF model, the parts of a split set in order; None for any other model.

    Raises ModelNotFoundError if files are missing or if there are several models."""
    model, _, file = name.rpartition(":")
    if model and file.endswith(SUFFIX) and not os.path.exists(name):
        path = _place(model, revision, cache) / file
        if Path(file).name != file or not os.path.isfile(path):
            raise ModelNotFoundError(
                f"{file} is not among the downloaded files of {model}; download it with "
                f"`text-generation-server download-weights {name}`"
            )
        return _list_parts(path)
    place = _place(name, revision, cache)
    if os.path.isfile(place):
        return _list_parts(place) if _is_gguf(place) else None
    return _only_model(place)


def wait_for_tokenizer(directory: Path) -> None:
    """Wait while a directory's tokenizer is being written. If that fails, the launcher ends this process."""
    while (directory / UNFINISHED_TOKENIZER).exists():
        time.sleep(POLL_S)


def find_named_place(directory: Path) -> Path:
    """Return the GGUF file, or the first of its parts, for which a directory was written; any other
    directory itself.

    Such a directory is temporary and links to the files, so its own name means nothing to the operator."""
    links = (file.readlink() for file in _list_files(directory) if file.is_symlink())
    return next((target for target in links if target.is_absolute()), directory)  # not in the hub cache


def refuse_gguf(place: Path) -> None:
    """Raise ModelNotFoundError for a GGUF file, and for a directory whose only weights are GGUF files."""
    files = [place] if os.path.isfile(place) and _is_gguf(place) else _list_files(place)
    if files:
        raise ModelNotFoundError(
            f"{files[0]} is a GGUF file, which this command does not read; convert it: "
            f"{COMMAND} {shlex.quote(str(files[0]))} DIRECTORY"
        )


def refuse_gguf_on_hub(name: str, files: Sequence[str]) -> None:
    """Raise ModelNotFoundError for a model on the hub whose only weights are GGUF files."""
    gguf = sorted(file for file in files if file.endswith(SUFFIX) and not file.startswith(PROJECTOR))
    if gguf and not any(fnmatch(file, pattern) for file in files for pattern in OTHER_WEIGHT_FILES):
        raise ModelNotFoundError(
            f"{name} has GGUF files: download one by its name, {name}:{gguf[0]}, or all: --extension .gguf"
        )


def split_set(name: str) -> list[str]:
    """Return the names of all parts of a file's split set, or only the file's name if it is not split."""
    part = PART.fullmatch(name)
    if part is None:
        return [name]
    return [f"{part[1]}-{number:05}-of-{part[3]}{SUFFIX}" for number in range(1, int(part[3]) + 1)]


def _place(name: str, revision: str | None, cache: Path) -> Path:
    entry = cache_entry(name, cache)
    return find_snapshot(entry, revision) if name and os.path.isdir(entry) else Path(name)


def _list_parts(file: Path) -> list[Path]:
    parts = [file.with_name(name) for name in split_set(file.name)]
    if missing := [part.name for part in parts if not os.path.isfile(part)]:
        raise ModelNotFoundError(f"{file} is a part of {len(parts)}: {missing[0]} is missing")
    return parts


def _only_model(directory: Path) -> list[Path] | None:
    files = _list_files(directory)
    if not files:
        return None
    if len({split_set(file.name)[0] for file in files}) > 1:
        names = ", ".join(file.name for file in files[:MAX_SHOWN])
        raise ModelNotFoundError(f"{directory} has several GGUF files; select one of them: {names}")
    return _list_parts(files[0])


def _list_files(directory: Path) -> list[Path]:
    """Return the GGUF files of a directory without other weights."""
    if not os.path.isdir(directory) or any(any(directory.glob(each)) for each in OTHER_WEIGHT_FILES):
        return []
    return sorted(file for file in directory.glob(f"*{SUFFIX}") if not file.name.startswith(PROJECTOR))


def _is_gguf(file: Path) -> bool:
    if file.suffix == SUFFIX:
        return True
    try:
        with file.open("rb") as content:
            return content.read(len(MAGIC)) == MAGIC
    except OSError:
        return False
