"""Locates speculators, and the models that they were trained for."""

from pathlib import Path

from tgis.hub import model_files
from tgis.hub.cache import find_model_files
from tgis.hub.model_files import ModelNotFoundError

BASE = "base_model_name_or_path"
MTP = "mtp"  # name of the speculator that is part of the model's checkpoint


def find_speculator(name: str, cache: Path) -> Path:
    """Return the absolute directory of a speculator, given a directory or an id in the hub cache, or `MTP`.
    Raises ModelNotFoundError."""
    if name == MTP:
        return Path(MTP)
    try:
        return find_model_files(name, None, cache).absolute()
    except ModelNotFoundError as error:
        raise ModelNotFoundError(f"speculator: {name} is neither a directory nor in the hub cache") from error


def is_speculator(directory: Path) -> bool:
    """Return True if the directory has a speculator instead of a model. Raises ModelNotFoundError."""
    config = model_files.read_json(directory, "config.json")
    names = config.get("architectures")
    is_eagle = isinstance(names, list) and any("eagle" in str(name).lower() for name in names)
    kind = config.get("model_type")
    return is_eagle or kind in ("mlp_speculator", "medusa", "eagle") or "medusa_num_heads" in config


def find_base_name(directory: Path) -> str | None:
    """Return the name of the model for which the speculator in a directory was trained, or None if the
    directory has no speculator. Raises ModelNotFoundError."""
    if not is_speculator(directory):
        return None
    name = model_files.read_json(directory, "config.json").get(BASE)
    if not isinstance(name, str) or not name:
        raise ModelNotFoundError(
            f"{directory} has a speculator, and its config.json has no {BASE}: name the model, and set "
            "--speculator to this one"
        )
    return name
