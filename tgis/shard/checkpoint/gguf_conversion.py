"""Converts GGUF files to a directory of safetensors files with a configuration and a tokenizer."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from tgis.convert.atomic_write import ConversionError, move_files, staging_directory
from tgis.convert.gguf.model_directory import CONFIG, write_settings
from tgis.errors import first_line
from tgis.shard.checkpoint.gguf.checkpoint import GgufCheckpoint
from tgis.shard.checkpoint.tensors import DTYPES

FILE_BYTES = 4 << 30
INDEX = "model.safetensors.index.json"


def convert_gguf(files: Sequence[Path], output: Path, dtype: str) -> str:
    """Write the model to a directory that is new or empty. Return a message. Raises ConversionError and
    WeightsError."""
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConversionError(f"{output} cannot be created: {error.strerror}") from error
    if any(output.iterdir()):
        raise ConversionError(f"{output} is not empty")
    with staging_directory(output) as staged:
        checkpoint = GgufCheckpoint(files)
        write_settings(checkpoint.files, staged)
        _set_dtype(staged, dtype)
        settings = sorted(staged.iterdir())
        written = [*_write_weights(checkpoint, staged, DTYPES[dtype]), *settings]
        written.sort(key=lambda file: file.name == CONFIG)  # config.json comes last, because it makes a model
        move_files(written, output, like=[files[0]] * len(written))
    return f"Converted {files[0].name} to {output}"


def _set_dtype(directory: Path, dtype: str) -> None:
    path = directory / CONFIG
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(config | {"dtype": dtype}, indent=2) + "\n", encoding="utf-8")


def _write_weights(checkpoint: GgufCheckpoint, directory: Path, dtype: torch.dtype) -> list[Path]:
    """Write the tensors to files of a limited size, and an index. Return the paths."""
    written: list[Path] = []
    file_of: dict[str, str] = {}
    total = 0
    for tensors in _read_groups(checkpoint, dtype):
        name = f"model-{len(written) + 1:05}.safetensors"
        try:
            save_file(tensors, directory / name, metadata={"format": "pt"})
        except (SafetensorError, OSError) as error:
            raise ConversionError(
                f"{directory.parent / name} cannot be written: {first_line(error)}"
            ) from error
        written.append(directory / name)
        file_of |= dict.fromkeys(tensors, name)
        total += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": file_of}
    (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return [*written, directory / INDEX]


def _read_groups(checkpoint: GgufCheckpoint, dtype: torch.dtype) -> Iterator[dict[str, Tensor]]:
    group: dict[str, Tensor] = {}
    for name in checkpoint.list_names():
        group[name] = checkpoint.fetch(name).read().to(dtype, copy=True)
        if sum(tensor.nbytes for tensor in group.values()) > FILE_BYTES:
            yield group
            group = {}
    if group:
        yield group
