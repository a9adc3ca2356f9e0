"""Converts PyTorch's pickled weights to safetensors.

Pickles are read with weights_only, one at a time and memory-mapped, to save memory. Each written file is read
back and compared."""

import json
import logging
import re
import zipfile
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tgis.convert.atomic_write import ConversionError, move_files, staging_directory
from tgis.errors import first_line
from tgis.hub import model_files
from tgis.tensor_files.errors import DAMAGED, INCOMPLETE, TensorFileError
from tgis.tensor_files.mapped_safetensors import separate_memory
from tgis.tensor_files.safe_pickle import can_map, open_pickle

logger = logging.getLogger(__name__)

INDEX_END, NEW_INDEX_END = ".bin.index.json", ".safetensors.index.json"
NO_WEIGHTS = ("arguments", "args", "training", "optimizer", "scheduler", "index")
# Attributes of transformers' model classes that list tensors the class does not need. If an attribute is a
# mapping, its keys are the names.
SPARE_NAMES = (
    "_tied_weights_keys",
    "_keys_to_ignore_on_load_missing",
    "_keys_to_ignore_on_load_unexpected",
)


@dataclass(frozen=True)
class Converted:
    """Properties of a converted file. `kept_as` maps removed names of shared tensors to the kept names."""

    num_bytes: int
    names: frozenset[str]
    kept_as: Mapping[str, str]


def convert_to_safetensors(directory: Path) -> str:
    """Write a .safetensors file for every .bin file of weights, or none if one of them cannot be converted.

    Return a message. Raises ConversionError and ModelNotFoundError."""
    indexes = sorted(directory.glob("*" + INDEX_END))
    files = find_pickles(directory)
    if len(indexes) > 1:
        return f"Found more than one .bin.index.json file: {[index.name for index in indexes]}"
    if not files:
        return "No pytorch .bin files found to convert"
    if any(directory.glob("*.safetensors")):
        return "Existing .safetensors weights found, remove them first to reconvert"
    if (directory / "model.safetensors.index.json").exists():
        return "Existing model.safetensors.index.json file found, remove it first to reconvert"
    files_of = {index: _read_index(index, files) for index in indexes}
    with staging_directory(directory) as staged:
        results = {file.name: _convert_one(file, staged, directory) for file in files}
        for index, content in files_of.items():
            (staged / new_name(index.name)).write_text(_rewrite_index(index, content, results))
        originals = [*files, *indexes]  # indexes last, because readers expect the files that they list
        move_files([staged / new_name(file.name) for file in originals], directory, like=originals)
    return f"Converted {len(files)} files to .safetensors"


def find_pickles(directory: Path) -> list[Path]:
    """Return the .bin files that contain weights, sorted by name."""
    return sorted(p for p in directory.glob("*.bin") if not any(word in p.name for word in NO_WEIGHTS))


def new_name(name: str) -> str:
    """Return the name of the file to which a .bin file, or an index of .bin files, is converted."""
    end, new_end = (INDEX_END, NEW_INDEX_END) if name.endswith(INDEX_END) else (".bin", ".safetensors")
    return name.removesuffix(end).removeprefix("pytorch_") + new_end


def _convert_one(file: Path, staged: Path, directory: Path) -> Converted:
    logger.info("converting %s", file)
    tensors = _load(file)
    kept_as = _choose_names(tensors, directory)
    kept = {name: tensor for name, tensor in tensors.items() if name not in kept_as}
    target = staged / new_name(file.name)
    try:
        save_file(separate_memory(kept), target, metadata={**kept_as, "format": "pt"})
        _compare(tensors, kept_as, target)
    except (SafetensorError, OSError) as error:
        raise ConversionError(f"{file}: {target.name} cannot be written: {first_line(error)}") from error
    return Converted(sum(tensor.nbytes for tensor in kept.values()), frozenset(kept), kept_as)


def _load(file: Path) -> dict[str, Tensor]:
    """Return the tensors by name, memory-mapped if possible. Raises ConversionError."""
    try:
        _check_sums(file)
        content = open_pickle(file)
    except TensorFileError as error:
        raise ConversionError(str(error)) from error
    except (OSError, zipfile.BadZipFile) as error:
        raise ConversionError(f"{file} {DAMAGED}") from error
    for name, tensor in content.items():
        if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
            raise ConversionError(f"{file}: {name} is not a plain tensor")
    return content


def _check_sums(file: Path) -> None:
    """Check the checksums of a zip archive, which a memory map ignores. Raises ConversionError."""
    if can_map(file):
        with zipfile.ZipFile(file) as archive:
            if damaged := archive.testzip():
                raise ConversionError(f"{file} is damaged: its member {damaged} has a wrong checksum")


def _choose_names(tensors: Mapping[str, Tensor], directory: Path) -> dict[str, str]:
    """Return a mapping from removed to kept names, for names that share a tensor."""
    groups = defaultdict(list)
    for name, tensor in tensors.items():
        place = (tensor.untyped_storage().data_ptr(), tensor.storage_offset())
        if tensor.numel():
            groups[*place, tensor.dtype, tensor.shape, tensor.stride()].append(name)
    shared = [names for names in groups.values() if len(names) > 1]
    spare = _spare_names(directory) if shared else []
    kept_as: dict[str, str] = {}
    for names in shared:
        kept = min(names, key=lambda name: (any(re.search(pattern, name) for pattern in spare), name))
        kept_as |= {name: kept for name in sorted(names) if name != kept}
    return kept_as


def _spare_names(directory: Path) -> list[str]:
    """Return patterns of the names that the model's class does not need."""
    import transformers  # imported late: the import takes seconds, and few checkpoints need it

    [name, *_] = model_files.read_json(directory, "config.json").get("architectures") or [""]
    model_class = getattr(transformers, name, None) if name else None
    lists = (getattr(model_class, attribute, None) for attribute in SPARE_NAMES)
    return [pattern for patterns in lists for pattern in patterns or ()]


def _compare(tensors: Mapping[str, Tensor], kept_as: Mapping[str, str], target: Path) -> None:
    with safe_open(target, framework="pt") as written:
        for name, tensor in tensors.items():
            if not _is_same(tensor, written.get_tensor(kept_as.get(name, name))):
                raise ConversionError(f"The output tensors do not match for key {name}")


def _is_same(first: Tensor, second: Tensor) -> bool:
    """Return True if the tensors are bit-identical, so that a NaN equals itself."""
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    return torch.equal(*(one.detach().contiguous().view(-1).view(torch.uint8) for one in (first, second)))


def _read_index(index: Path, files: list[Path]) -> dict[str, Any]:
    content = model_files.read_json(index.parent, index.name)
    file_of = content.get("weight_map")
    if not isinstance(file_of, dict):
        raise ConversionError(f"{index} is not a weight index")
    if missing := sorted({str(name) for name in file_of.values()} - {file.name for file in files}):
        raise ConversionError(f"{index} names {', '.join(missing)}, which does not exist: {INCOMPLETE}")
    return content


def _rewrite_index(index: Path, content: dict[str, Any], results: Mapping[str, Converted]) -> str:
    file_of = {}
    for name, file in content["weight_map"].items():
        if name in results[file].names:
            file_of[name] = new_name(file)
        elif name not in results[file].kept_as:
            raise ConversionError(f"{index} names {name}, which {file} does not contain: {INCOMPLETE}")
    used = {name: results[name] for name in content["weight_map"].values()}
    metadata = (content.get("metadata") or {}) | {"total_size": sum(one.num_bytes for one in used.values())}
    return json.dumps({"metadata": metadata, "weight_map": file_of}, indent=2, sort_keys=True) + "\n"
