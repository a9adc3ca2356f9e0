"""Locates speculators, and the models that they were trained for."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tgis.hub import model_files
from tgis.hub.cache import find_model_files
from tgis.hub.model_files import ModelNotFoundError

CONFIG = "config.json"
BASE = "base_model_name_or_path"
MTP = "mtp"  # name of the speculator that is part of the model's checkpoint
# Architectures of the authors' heads, vLLM's and SGLang's, such as LlamaForCausalLMEagle3.
_EAGLE = re.compile(
    r"(?:\w+ForCausalLM)?eagle(3?)(?:\w+ForCausalLM|Model|Speculator|DraftModel)?", re.IGNORECASE
)


def find_speculator(name: str, cache: Path) -> Path:
    """Return the absolute directory of a speculator, given a directory or an id in the hub cache, or `MTP`.
    Raises ModelNotFoundError."""
    if name == MTP:
        return Path(MTP)
    try:
        directory = find_model_files(name, None, cache).absolute()
    except ModelNotFoundError as error:
        raise ModelNotFoundError(f"speculator: {name} is neither a directory nor in the hub cache") from error
    if not (directory / CONFIG).is_file():
        raise ModelNotFoundError(f"speculator: {directory} has no {CONFIG}")
    return directory


def is_speculator(directory: Path) -> bool:
    """Return True if the directory has a speculator instead of a model. Raises ModelNotFoundError."""
    config = model_files.read_json(directory, CONFIG)
    is_other = config.get("model_type") in ("mlp_speculator", "medusa") or "medusa_num_heads" in config
    return is_other or find_eagle(config) is not None


def find_eagle(config: Mapping[str, Any]) -> str | None:
    """Return "eagle" or "eagle3" if a config.json names such a head, else None."""
    names = config.get("architectures")
    for name in names if isinstance(names, list) else ():
        if (match := _EAGLE.fullmatch(str(name))) is not None:
            return f"eagle{match[1]}"
    given = config.get("speculators_model_type")
    if given in ("eagle", "eagle3"):
        return str(given)
    return "eagle" if config.get("model_type") == "eagle" else None


def find_base_name(directory: Path) -> str | None:
    """Return the name of the model for which the speculator in a directory was trained, or None if the
    directory has no speculator. Raises ModelNotFoundError."""
    if not is_speculator(directory):
        return None
    name = model_files.read_json(directory, CONFIG).get(BASE)
    if not isinstance(name, str) or not name:
        raise ModelNotFoundError(
            f"{directory} has a speculator, and its config.json has no {BASE}: name the model, and set "
            "--speculator to this one"
        )
    return name
