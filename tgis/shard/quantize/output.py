"""Output directory of a run. Each layer is a separate file, and an interrupted run resumes at the first layer
without one."""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from tgis.errors import first_line
from tgis.hub import model_files
from tgis.shard.checkpoint.files import SAFETENSORS, Checkpoint
from tgis.shard.quantize.packing import Tensors
from tgis.shard.quantize.settings import QuantizeError
from tgis.tensor_files.mapped_safetensors import separate_memory

RUN_FILE = ".quantize.json"  # exists until the run is finished
MAX_FILE_BYTES = 10 * 10**9
ERRORS = "errors"  # key in the metadata of a layer's file
METADATA = "__metadata__"  # key in the header of a safetensors file
# Files of the model that are copied: tokenizers, settings, code and licences.
COPIED = ("*.json", "*.model", "*.tiktoken", "*.txt", "*.jinja", "*.py", "LICENSE*")
CONFIG, QUANTIZE_CONFIG = "config.json", "quantize_config.json"

Errors = dict[str, tuple[float, float]]
"""Kind of matrix -> relative errors of its outputs by GPTQ and by rounding to nearest."""


class OutputDirectory:
    """Output files of a run. All methods raise QuantizeError."""

    def __init__(self, path: Path, settings: Mapping[str, Any], method: str):
        """Create the directory, or resume the run in it, which must have the same settings."""
        self.path = path
        self._metadata = {
            "format": "pt",
            "quantized": method,
            "origin": "text-generation-server quantize",
        }
        self._begin(dict(settings))

    def read_layer(self, layer: int) -> tuple[Tensors, Errors] | None:
        """Return the tensors and errors of a finished layer, otherwise None."""
        path = self.path / file_name(layer)
        if not path.is_file():
            return None
        try:
            with safe_open(path, framework="pt") as content:
                tensors = {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118
                errors = json.loads(content.metadata()[ERRORS])
        except (SafetensorError, OSError, LookupError, ValueError) as error:
            raise QuantizeError(f"{path} cannot be read: {first_line(error)}; remove it") from error
        return tensors, {kind: tuple(pair) for kind, pair in errors.items()}

    def write_layer(self, layer: int, tensors: Tensors, errors: Errors) -> None:
        self._write(file_name(layer), tensors, {ERRORS: json.dumps(errors)})

    def finish(self, source: Path, num_layers: int, rest: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Write the tensors that are not quantized and the index, and copy other files."""
        number = num_layers
        pending = Tensors()
        num_bytes = 0
        for name, tensor in rest:
            if pending and num_bytes + tensor.nbytes > MAX_FILE_BYTES:
                self._write(file_name(number), pending)
                number += 1
                pending = {}
                num_bytes = 0
            pending[name] = tensor
            num_bytes += tensor.nbytes
        self._write(file_name(number), pending)
        self._write_index(number + 1)
        for file in sorted(file for pattern in COPIED for file in source.glob(pattern)):
            if file.name != CONFIG and not file.name.endswith(".index.json"):
                with self._writing(self.path / file.name):
                    shutil.copyfile(file, self.path / file.name)

    def write_configs(self, config: Mapping[str, Any], quantization: Mapping[str, Any]) -> None:
        """Write config.json, which makes the checkpoint complete."""
        if quantization["quant_method"] == "gptq":
            self._write_json(QUANTIZE_CONFIG, quantization)
        self._write_json(CONFIG, {**config, "quantization_config": quantization})
        (self.path / RUN_FILE).unlink()

    def _begin(self, settings: dict[str, Any]) -> None:
        with self._writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            names = {*os.listdir(self.path)} - {part_name(RUN_FILE)}
        if RUN_FILE not in names:
            if names:
                raise QuantizeError(
                    f"{self.path} exists and does not contain a run to resume: use another directory"
                )
            self._write_json(RUN_FILE, settings)
            return
        started = model_files.read_json(self.path, RUN_FILE)
        for key, value in settings.items():
            if started.get(key) != value:
                raise QuantizeError(
                    f"{self.path} contains a run with {key} {started.get(key)}, but this run has {value}: "
                    "use the same options, text and model, or another directory"
                )

    def _write(self, name: str, tensors: Tensors, metadata: Mapping[str, str] | None = None) -> None:
        part = self.path / part_name(name)
        with self._writing(self.path / name):
            save_file(separate_memory(tensors), part, {**self._metadata, **(metadata or {})})
            _sort_metadata(part)
            part.chmod((self.path / RUN_FILE).stat().st_mode)  # safetensors permits only its owner
            _sync(part)
            part.replace(self.path / name)

    def _write_index(self, num_files: int) -> None:
        file_of = {}
        total = 0
        for name in map(file_name, range(num_files)):
            with safe_open(self.path / name, framework="pt") as content:
                for key in content.keys():  # noqa: SIM118
                    file_of[key] = name
            total += _count_bytes(self.path / name)
        self._write_json(SAFETENSORS[1], {"metadata": {"total_size": total}, "weight_map": file_of})

    def _write_json(self, name: str, content: Mapping[str, Any]) -> None:
        part = self.path / part_name(name)
        with self._writing(self.path / name):
            part.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
            _sync(part)
            part.replace(self.path / name)

    @contextmanager
    def _writing(self, path: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise QuantizeError(f"{path} cannot be written: {error.strerror}") from error
        except SafetensorError as error:
            raise QuantizeError(f"{path} cannot be written: {first_line(error)}") from error


def file_name(number: int) -> str:
    return f"model-{number + 1:05}.safetensors"


def part_name(name: str) -> str:
    """Return the name of a file while it is incomplete."""
    return f".{name}.part"


def read_rest(directory: Path, replaced: frozenset[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a checkpoint that are not in `replaced`. Raises WeightsError."""
    checkpoint = Checkpoint(directory)
    for name in sorted(set(checkpoint.list_unread()) - replaced):
        yield name, checkpoint.fetch_any(name).read()


def _sort_metadata(path: Path) -> None:
    """Sort the metadata of a file, which safetensors writes in random order, so that equal runs write equal
    bytes."""
    with path.open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        header[METADATA] = dict(sorted(header[METADATA].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        assert len(text) <= length, "sorting does not lengthen the header"
        file.seek(8)
        file.write(text.ljust(length))


def _count_bytes(path: Path) -> int:
    """Return the size of a file's tensors, which follow the header and its 8-byte length."""
    with path.open("rb") as file:
        return path.stat().st_size - 8 - int.from_bytes(file.read(8), "little")


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
