"""Reads PEFT's directory of a LoRA adapter, with all checks that need no model."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from tgis.prompts import lora_config
from tgis.prompts.errors import ContentError, TooLargeError, quote
from tgis.prompts.lora_config import LoraConfig, parse_config
from tgis.tensor_files.mapped_safetensors import map_tensors
from tgis.tensor_files.safe_pickle import TORN, PickleError
from tgis.tensor_files.small_pickle import load_small

SAFETENSORS, PICKLE = lora_config.WEIGHTS
MAX_HEADER_BYTES = 32 << 20
MAX_TENSORS = 1 << 17  # many times as many as the largest model has
DTYPES = (torch.float32, torch.float16, torch.bfloat16)

_ROOT = "base_model.model."
_LINEAR = re.compile(r"(.+)\.(lora_[AB])(?:\.default)?\.weight")
_TABLE = re.compile(r"(.+)\.(lora_embedding_[AB])(?:\.default)?")
_BASE = re.compile(r"(.+?)(?:\.base_layer)?\.weight")
_BIAS = re.compile(r".+\.lora_B(?:\.default)?\.bias")
_MAGNITUDE = "lora_magnitude_vector"
# Parameters that hold all experts. If a module has two, PEFT wraps the first as `base_layer` of the second.
_UP, _DOWN = "gate_up_proj", "down_proj"


def read_adapter_files(directory: Path, max_bytes: int) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Return an adapter's tensors by name, and the scale of each module's low-rank product by module.

    Names are `{module}.lora_A.weight` [rank, in], `{module}.lora_B.weight` [out, rank],
    `{module}.lora_embedding_A` [rank, rows] and `{module}.lora_embedding_B` [width, rank]. Tensors have the
    dtype they are stored in. They may be mapped, so the files must not change.

    Modules have PEFT's names without the prefix `base_model.model.`. A parameter that holds all experts is
    named `{module}.gate_up_proj` or `{module}.down_proj` in place of the module and has num_experts * rank in
    place of the rank. `{module}.base` is the adapter's copy of the model's own weight.

    Raises UnsupportedTypeError, TooLargeError, ContentError with the cause, and OSError."""
    file = directory / lora_config.NAME
    if not file.is_file():
        raise ContentError(f"invalid adapter: no {lora_config.NAME} found")
    config = parse_config(_bounded(file, lora_config.MAX_CONFIG_BYTES).read_bytes())
    tensors: dict[str, Tensor] = {}
    stored = _read_tensors(directory, max_bytes)
    if len(stored) > MAX_TENSORS:
        raise ContentError(f"invalid adapter: it has {len(stored)} tensors, more than {MAX_TENSORS}")
    for name, tensor in stored.items():
        named = _rename(name)
        if named in tensors:
            raise ContentError(f"invalid adapter: it holds {quote(named)} twice")
        tensors[named] = _check(named, tensor)
    if config.ties_head and any(".lora_embedding_" in name for name in tensors):
        raise ContentError("an adapter of embeddings that are tied (ensure_weight_tying) is not supported")
    tensors = _name_parameters(tensors, config) if config.target_parameters else tensors
    return tensors, dict(_scales(tensors, config))


def split_name(name: str) -> tuple[str, str]:
    """Split a tensor's name from `read_adapter_files` into module and kind.

    Kinds are for example "lora_A.weight", "lora_embedding_B" and "base"."""
    module, _, kind = name.removesuffix(".weight").rpartition(".")
    return module, kind + ".weight" * name.endswith(".weight")


def _read_tensors(directory: Path, max_bytes: int) -> dict[str, Tensor]:
    files = {SAFETENSORS: _load, PICKLE: _unpickle}
    for name, read in files.items():
        if (directory / name).is_file():
            found = read(_bounded(directory / name, max_bytes))
            # Tensors of a pickle may claim more numbers than it has bytes.
            if sum(tensor.numel() * tensor.itemsize for tensor in found.values()) > max_bytes:
                raise TooLargeError
            return found
    raise ContentError(f"invalid adapter: neither {SAFETENSORS} nor {PICKLE} found")


def _bounded(file: Path, max_bytes: int) -> Path:
    if file.stat().st_size > max_bytes:
        raise TooLargeError
    return file


def _load(file: Path) -> dict[str, Tensor]:
    with file.open("rb") as content:
        if int.from_bytes(content.read(8), "little") > MAX_HEADER_BYTES:
            raise ContentError(f"invalid adapter: the header of {SAFETENSORS} is too large")
    try:
        found, _ = map_tensors(file)
    # For a damaged header the library may raise any of these errors.
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise ContentError(f"invalid adapter: {SAFETENSORS} {TORN}") from error
    return found


def _unpickle(file: Path) -> dict[str, Tensor]:
    try:
        found: Any = load_small(file)
    except PickleError as error:
        raise ContentError(f"invalid adapter: {PICKLE} {str(error).removeprefix(f'{file} ')}") from error
    named = found.items() if isinstance(found, dict) else [(None, found)]
    if not all(isinstance(name, str) and _is_plain(value) for name, value in named):
        raise ContentError(f"invalid adapter: {PICKLE} does not hold tensors by name")
    return {str(name): tensor.detach() for name, tensor in named}


def _is_plain(value: object) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided and value.device.type == "cpu"


def _rename(name: str) -> str:
    plain = name.removeprefix(_ROOT)
    if _BIAS.fullmatch(plain):
        raise ContentError("a bias of lora_B is not supported")
    if _MAGNITUDE in plain:
        raise ContentError("weight-decomposed LoRA (DoRA) is not supported")
    if found := _LINEAR.fullmatch(plain):
        return f"{found[1]}.{found[2]}.weight"
    if found := _TABLE.fullmatch(plain):
        return f"{found[1]}.{found[2]}"
    if (found := _BASE.fullmatch(plain)) and "lora_" not in plain:
        return f"{found[1]}.base"
    raise ContentError(f"invalid adapter: {quote(plain)} is no tensor of LoRA")


def _check(name: str, tensor: Tensor) -> Tensor:
    if tensor.dtype not in DTYPES:
        kind = str(tensor.dtype).removeprefix("torch.")
        raise ContentError(f"invalid adapter: {quote(name)} is of type {kind}")
    if tensor.dim() != 2 or not tensor.numel():
        raise ContentError(f"invalid adapter: {quote(name)} has shape {list(tensor.shape)}")
    tensor = tensor.contiguous()
    if not all(bound.isfinite() for bound in tensor.aminmax()):
        raise ContentError(f"invalid adapter: {quote(name)} holds numbers that are not finite")
    return tensor


def _name_parameters(tensors: Mapping[str, Tensor], config: LoraConfig) -> dict[str, Tensor]:
    targets = {target.rpartition(".")[2] for target in config.target_parameters} & {_UP, _DOWN}
    renamed = {}
    for name, tensor in tensors.items():
        module, kind = split_name(name)
        if targets and kind in ("lora_A.weight", "lora_B.weight"):
            if module.endswith(".experts.base_layer"):
                module = f"{module.removesuffix('.base_layer')}.{_UP}"
            elif module.endswith(".experts"):
                is_outer = f"{module}.base_layer.{kind}" in tensors
                module = f"{module}.{_DOWN if is_outer or len(targets) > 1 else next(iter(targets))}"
        renamed[f"{module}.{kind}"] = tensor
    return renamed


def _scales(tensors: Mapping[str, Tensor], config: LoraConfig) -> Iterator[tuple[str, float]]:
    """Yield each module's scale. Check that each A has its B, and that the ranks are those configured."""
    modules = dict.fromkeys(module for module, kind in map(split_name, tensors) if kind != "base")
    if not modules:
        raise ContentError("invalid adapter: it holds no tensors of LoRA")
    for module in modules:
        a, b = _pair(module, tensors)
        key = _key(module, config)
        rank = config.rank_of(key)
        is_fused = bool(config.target_parameters) and module.endswith((f".{_UP}", f".{_DOWN}"))
        if a.shape[0] != b.shape[1] or (a.shape[0] % rank if is_fused else a.shape[0] != rank):
            shapes = f"{list(a.shape)} and {list(b.shape)}"
            raise ContentError(f"invalid adapter: {quote(module)} has shapes {shapes}, expected rank {rank}")
        yield module, config.scale_of(key, rank)


def _pair(module: str, tensors: Mapping[str, Tensor]) -> list[Tensor]:
    kinds = ("lora_A.weight", "lora_B.weight")
    if not any(f"{module}.{kind}" in tensors for kind in kinds):
        kinds = ("lora_embedding_A", "lora_embedding_B")
    for kind in kinds:
        if f"{module}.{kind}" not in tensors:
            raise ContentError(f"invalid adapter: {quote(f'{module}.{kind}')} is missing")
    return [tensors[f"{module}.{kind}"] for kind in kinds]


def _key(module: str, config: LoraConfig) -> str:
    """Return the name that patterns are matched against."""
    parameter = f"{module}.weight"
    is_parameter = any(f".{parameter}".endswith(f".{target}") for target in config.target_parameters)
    return parameter if is_parameter else module
