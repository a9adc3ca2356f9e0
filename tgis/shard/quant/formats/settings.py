"""Settings of quantized checkpoints, which are in config.json, in a separate file, or in tensors."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from tgis.hub import model_files
from tgis.shard.checkpoint.files import SAFETENSORS, Checkpoint
from tgis.shard.checkpoint.tensors import WeightsError

SERVED = (
    "serve a GPTQ, AWQ, compressed-tensors, fp8 or bitsandbytes checkpoint of this model, or the original "
    "with --quantize"
)
# Files that AutoGPTQ and AutoAWQ write -> method.
_OWN_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
MAX_GROUP_SIZE = (1 << 31) - 1
# Tensors of one element that TGIS writes instead.
_TENSORS = {"bits": "gptq_bits", "group_size": "gptq_groupsize"}


class QuantizationSettings(Mapping[str, Any]):
    """Settings by the names in the checkpoint. Getters raise WeightsError, which names the place of the
    settings, if a value has the wrong type."""

    def __init__(self, values: Mapping[str, Any], place: str, method: str = ""):
        self._values = values
        self.place = place
        self.method = self.text("quant_method", method)
        is_marlin = self.flag("is_marlin_format") or self.text("checkpoint_format", "") == "marlin"
        if self.method == "gptq" and is_marlin:
            self.method = "marlin"

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def text(self, key: str, default: str) -> str:
        """Return a string in lower case."""
        value = self.get(key) or default
        if not isinstance(value, str):
            self.refuse(f"{key} {value!r} is not a text")
        return value.lower()

    def number(self, *keys: str) -> int | None:
        """Return the integer at the first key that is present."""
        key = next((key for key in keys if self.get(key) is not None), keys[0])
        value = self.get(key)
        if value is not None and type(value) is not int:
            self.refuse(f"{key} {value!r} is not an integer")
        return value

    def group_size(self, *keys: str) -> int | None:
        """Return the number of columns that share a scale, -1 for all."""
        size = self.number(*keys)
        if size is not None and size != -1 and not 0 < size <= MAX_GROUP_SIZE:
            self.refuse(f"{keys[0]} {size} is neither -1 nor a positive integer of 31 bits")
        return size

    def pair(self, key: str) -> tuple[int, int] | None:
        """Return two positive integers."""
        value = self.get(key)
        if value is None:
            return None
        if not (isinstance(value, list) and [type(each) for each in value] == [int, int] and min(value) > 0):
            self.refuse(f"{key} {value!r} is not two positive integers")
        return value[0], value[1]

    def flag(self, key: str) -> bool:
        value = self.get(key) or False
        if not isinstance(value, bool):
            self.refuse(f"{key} {value!r} is neither true nor false")
        return value

    def section(self, key: str) -> "QuantizationSettings":
        """Return the nested settings at a key, or empty ones."""
        value = self.get(key) or {}
        if not isinstance(value, dict):
            self.refuse(f"{key} is not an object")
        return QuantizationSettings(value, self.place)

    def refuse(self, problem: str) -> NoReturn:
        raise WeightsError(f"{self.place}: {problem}")


def read_settings(config: Mapping[str, Any], directory: Path) -> QuantizationSettings | None:
    """Return the settings of the quantized checkpoint in `directory`, or None if it is not quantized.

    Raises ModelNotFoundError and WeightsError."""
    text = config.get("text_config")
    for place in (config, text if isinstance(text, dict) else {}):
        for key in ("quantization_config", "compression_config"):
            if values := place.get(key):
                return _from_config(values, f"{directory / 'config.json'}: {key}")
    for name, method in _OWN_FILES.items():
        if values := model_files.read_json(directory, name):
            return QuantizationSettings(values, str(directory / name), method)
    return _from_tensors(directory)


def _from_config(values: object, place: str) -> QuantizationSettings:
    if not isinstance(values, dict):
        raise WeightsError(f"{place} is not an object")
    # Early releases of transformers supported only bitsandbytes and wrote no method.
    is_early = values.get("load_in_8bit") or values.get("load_in_4bit")
    return QuantizationSettings(values, place, "bitsandbytes" if is_early else "")


def _from_tensors(directory: Path) -> QuantizationSettings | None:
    if not any((directory / name).is_file() for name in SAFETENSORS):
        return None
    checkpoint = Checkpoint(directory)
    if any(name not in checkpoint for name in _TENSORS.values()):
        return None
    values = {key: _read_number(checkpoint, name) for key, name in _TENSORS.items()}
    return QuantizationSettings(values, str(directory), "gptq")


def _read_number(checkpoint: Checkpoint, name: str) -> int:
    tensor = checkpoint.fetch_any(name)
    value = tensor.read().flatten()
    if len(value) != 1 or value.is_floating_point():
        raise WeightsError(f"{tensor.label} is not a single integer")
    return int(value)
