"""Reads PEFT's directory of a LoRA adapter, with all checks that need no model.

A setting that changes the output and is not implemented is refused, never ignored."""

import json
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import regex
import torch
from torch import Tensor

from tgis.prompts.errors import AdapterError, TooLargeError, quote
from tgis.tensor_files.errors import TensorFileError
from tgis.tensor_files.mapped_safetensors import map_untrusted
from tgis.tensor_files.safe_pickle import is_plain, load_untrusted

CONFIG = "adapter_config.json"
STEM = "adapter_model"
SAFETENSORS, PICKLE = f"{STEM}.safetensors", f"{STEM}.bin"
WEIGHTS = (SAFETENSORS, PICKLE)  # next to the configuration; the first that exists is used
LORA = "LORA"
MAX_CONFIG_BYTES = 4 << 20
# PEFT's defaults for missing settings.
DEFAULT_RANK = DEFAULT_ALPHA = 8
# Initializations that leave the model's weights unchanged. Others subtract the adapter's initial product from
# the weights.
_PLAIN_INITS = (None, True, False, "gaussian", "eva", "orthogonal", "mica")
_REFUSED = {
    "use_dora": "weight-decomposed LoRA (DoRA)",
    "lora_bias": "a bias of lora_B (lora_bias)",
    "modules_to_save": "a module saved as a whole (modules_to_save)",
    "trainable_token_indices": "training of single tokens (trainable_token_indices)",
    "layer_replication": "replication of layers (layer_replication)",
    "alora_invocation_tokens": "activated LoRA (alora_invocation_tokens)",
    "use_qalora": "quantization-aware LoRA (use_qalora)",
    "use_bdlora": "block-diagonal LoRA (use_bdlora)",
    "arrow_config": "routing between adapters (arrow_config)",
    "kasa_config": "KaSA (kasa_config)",
    "monteclora_config": "Monte Carlo LoRA (monteclora_config)",
}
# Patterns come from the adapter and are untrusted. Benign ones need less than a tenth of this time.
_PATTERNS_TIMEOUT_S = 2.0
MAX_PATTERNS = 4096  # of ranks, and of alphas; every module is matched against all of them
MAX_HEADER_BYTES = 32 << 20
MAX_TENSORS = 1 << 17  # many times more than the largest model has
DTYPES = (torch.float32, torch.float16, torch.bfloat16)

_ALL_LINEAR = "all-linear"  # in place of a pattern of modules
_ROOT = "base_model.model."
_LINEAR = re.compile(r"(.+)\.(lora_[AB])(?:\.default)?\.weight")
_TABLE = re.compile(r"(.+)\.(lora_embedding_[AB])(?:\.default)?")
_BASE = re.compile(r"(.+?)(?:\.base_layer)?\.weight")
_BIAS = re.compile(r".+\.lora_B(?:\.default)?\.bias")
_MAGNITUDE = "lora_magnitude_vector"
# Parameters that contain all experts. If a module has two, PEFT wraps the first as `base_layer` of the
# second.
_UP, _PLAIN_UP, _DOWN = "gate_up_proj", "up_proj", "down_proj"
_FUSED = tuple(f".experts.{name}" for name in (_UP, _PLAIN_UP, _DOWN))

Value = TypeVar("Value")


class UnsupportedTypeError(AdapterError):
    """Error for an adapter that is not LoRA. Clients receive this text without a prefix."""


class PatternMatcher:
    """Matcher of one setting's patterns, with a time limit for all of them together."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._left_s = _PATTERNS_TIMEOUT_S

    def compile(self, pattern: str) -> "regex.Pattern[str]":
        """Compile a pattern. Raises AdapterError for an invalid one."""
        try:
            return regex.compile(pattern)
        except regex.error as error:
            raise _invalid(self._key) from error

    def matches(self, pattern: "regex.Pattern[str]", module: str) -> bool:
        """Return whether the pattern matches. Raises AdapterError when the time has run out."""
        if self._left_s <= 0:
            raise _invalid(self._key)
        start = time.monotonic()
        try:
            return pattern.match(module, timeout=self._left_s, concurrent=True) is not None
        except TimeoutError as error:
            raise _invalid(self._key) from error
        finally:
            self._left_s -= time.monotonic() - start


class Patterns(Generic[Value]):
    """Values of modules by patterns of their names, with a default for other modules."""

    def __init__(self, key: str, values: Mapping[str, Value], default: Value) -> None:
        """Compile the patterns of `key`. Raises AdapterError for an invalid pattern, and for too many."""
        self._matcher = PatternMatcher(key)
        self._values = values
        self._default = default
        if len(values) > MAX_PATTERNS:
            raise _invalid(key)
        compile = self._matcher.compile
        self._compiled = [(compile(rf"(.*\.)?({pattern})$"), value) for pattern, value in values.items()]

    def find(self, module: str) -> Value:
        """Return the value of the first pattern that matches `module` or its last parts. Raises
        AdapterError."""
        for pattern, value in self._compiled:
            if self._matcher.matches(pattern, module):
                return value
        return self._values.get(module, self._default)


@dataclass(frozen=True)
class LoraConfig:
    ranks: Patterns[int]
    alphas: Patterns[float]
    uses_square_root: bool
    target_parameters: tuple[str, ...]
    ties_head: bool
    module_patterns: Mapping[str, str]  # by the setting

    def scale_of(self, key: str, rank: int) -> float:
        """Return the factor of the module's or parameter's low-rank product. Raises AdapterError."""
        alpha = self.alphas.find(key)
        return alpha / (math.sqrt(rank) if self.uses_square_root else rank)

    def check_modules(self, modules: Iterable[str]) -> None:
        """Raise AdapterError if a setting's pattern cannot be matched against the modules.

        The result of the match is not needed: the tensors show which modules the adapter has."""
        for key, text in self.module_patterns.items():
            matcher = PatternMatcher(key)
            pattern = matcher.compile(rf"({text})$")
            for module in modules:
                matcher.matches(pattern, module)


def read_adapter_files(directory: Path, max_bytes: int) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Return an adapter's tensors by name, and the scale of each module's low-rank product by module.

    Names are `{module}.lora_A.weight` [rank, in], `{module}.lora_B.weight` [out, rank],
    `{module}.lora_embedding_A` [rank, rows] and `{module}.lora_embedding_B` [width, rank]. Tensors keep their
    stored dtype. They may be memory-mapped, so the files must not change.

    Modules have PEFT's names without the prefix `base_model.model.`. For a parameter that contains all
    experts, `{module}` is `{module}.gate_up_proj`, `{module}.up_proj` or `{module}.down_proj`, and the rank
    is num_experts * rank. `{module}.base` is the adapter's copy of the model's own weight.

    Raises UnsupportedTypeError, TooLargeError, AdapterError with the cause, and OSError."""
    file = directory / CONFIG
    if not file.is_file():
        raise AdapterError(f"invalid adapter: no {CONFIG} found")
    config = parse_config(_bounded(file, MAX_CONFIG_BYTES).read_bytes())
    tensors: dict[str, Tensor] = {}
    stored = _read_tensors(directory, max_bytes)
    if len(stored) > MAX_TENSORS:
        raise AdapterError(f"invalid adapter: it has {len(stored)} tensors, more than {MAX_TENSORS}")
    for name, tensor in stored.items():
        named = _rename(name)
        if named in tensors:
            raise AdapterError(f"invalid adapter: it contains {quote(named)} twice")
        tensors[named] = _check(named, tensor)
    if config.ties_head and any(".lora_embedding_" in name for name in tensors):
        raise AdapterError("an adapter of embeddings that are tied (ensure_weight_tying) is not supported")
    tensors = _name_parameters(tensors, config) if config.target_parameters else tensors
    scales = dict(_scales(tensors, config))
    config.check_modules(scales)
    return tensors, scales


def split_name(name: str) -> tuple[str, str]:
    """Split a tensor's name into module and kind, for example "lora_A.weight" or "base"."""
    module, _, kind = name.removesuffix(".weight").rpartition(".")
    return module, kind + ".weight" * name.endswith(".weight")


def _read_tensors(directory: Path, max_bytes: int) -> dict[str, Tensor]:
    files = [directory / name for name in WEIGHTS if (directory / name).is_file()]
    if not files:
        raise AdapterError(f"invalid adapter: neither {SAFETENSORS} nor {PICKLE} found")
    file = _bounded(files[0], max_bytes)
    try:
        content: Any = load_untrusted(file) if file.name == PICKLE else map_untrusted(file, MAX_HEADER_BYTES)
    except TensorFileError as error:
        raise AdapterError(f"invalid adapter: {str(error).removeprefix(f'{directory}/')}") from error
    tensors: dict[Any, Any] = content if isinstance(content, dict) else {None: content}
    if not all(isinstance(name, str) and is_plain(value) for name, value in tensors.items()):
        raise AdapterError(f"invalid adapter: {file.name} is not a mapping of names to tensors")
    # Tensors of a pickle may claim more elements than the file has bytes.
    if sum(tensor.numel() * tensor.itemsize for tensor in tensors.values()) > max_bytes:
        raise TooLargeError
    return {name: tensor.detach() for name, tensor in tensors.items()}


def _bounded(file: Path, max_bytes: int) -> Path:
    if file.stat().st_size > max_bytes:
        raise TooLargeError
    return file


def _rename(name: str) -> str:
    plain = name.removeprefix(_ROOT)
    if _BIAS.fullmatch(plain):
        raise AdapterError("a bias of lora_B is not supported")
    if _MAGNITUDE in plain:
        raise AdapterError("weight-decomposed LoRA (DoRA) is not supported")
    if match := _LINEAR.fullmatch(plain):
        return f"{match[1]}.{match[2]}.weight"
    if match := _TABLE.fullmatch(plain):
        return f"{match[1]}.{match[2]}"
    if (match := _BASE.fullmatch(plain)) and "lora_" not in plain:
        return f"{match[1]}.base"
    raise AdapterError(f"invalid adapter: {quote(plain)} is not a LoRA tensor")


def _check(name: str, tensor: Tensor) -> Tensor:
    if tensor.dtype not in DTYPES:
        kind = str(tensor.dtype).removeprefix("torch.")
        raise AdapterError(f"invalid adapter: {quote(name)} is of type {kind}")
    if tensor.dim() != 2 or not tensor.numel():
        raise AdapterError(f"invalid adapter: {quote(name)} has shape {list(tensor.shape)}")
    tensor = tensor.contiguous()
    if not all(bound.isfinite() for bound in tensor.aminmax()):
        raise AdapterError(f"invalid adapter: {quote(name)} contains values that are not finite")
    return tensor


def _name_parameters(tensors: Mapping[str, Tensor], config: LoraConfig) -> dict[str, Tensor]:
    targets = {target.rpartition(".")[2] for target in config.target_parameters} & {_UP, _PLAIN_UP, _DOWN}
    up = _PLAIN_UP if _PLAIN_UP in targets else _UP
    renamed = {}
    for name, tensor in tensors.items():
        module, kind = split_name(name)
        if targets and kind in ("lora_A.weight", "lora_B.weight"):
            if module.endswith(".experts.base_layer"):
                module = f"{module.removesuffix('.base_layer')}.{up}"
            elif module.endswith(".experts"):
                is_outer = f"{module}.base_layer.{kind}" in tensors
                module = f"{module}.{_DOWN if is_outer or len(targets) > 1 else next(iter(targets))}"
        renamed[f"{module}.{kind}"] = tensor
    return renamed


def _scales(tensors: Mapping[str, Tensor], config: LoraConfig) -> Iterator[tuple[str, float]]:
    """Yield each module's scale. Check that each A has its B, and that the ranks match the configuration."""
    modules = dict.fromkeys(module for module, kind in map(split_name, tensors) if kind != "base")
    if not modules:
        raise AdapterError("invalid adapter: it contains no LoRA tensors")
    for module in modules:
        a, b = _pair(module, tensors)
        key = _key(module, config)
        rank = config.ranks.find(key)
        is_fused = bool(config.target_parameters) and module.endswith(_FUSED)
        if a.shape[0] != b.shape[1] or (a.shape[0] % rank if is_fused else a.shape[0] != rank):
            shapes = f"{list(a.shape)} and {list(b.shape)}"
            raise AdapterError(f"invalid adapter: {quote(module)} has shapes {shapes}, expected rank {rank}")
        yield module, config.scale_of(key, rank)


def _pair(module: str, tensors: Mapping[str, Tensor]) -> list[Tensor]:
    kinds = ("lora_A.weight", "lora_B.weight")
    if not any(f"{module}.{kind}" in tensors for kind in kinds):
        kinds = ("lora_embedding_A", "lora_embedding_B")
    for kind in kinds:
        if f"{module}.{kind}" not in tensors:
            raise AdapterError(f"invalid adapter: {quote(f'{module}.{kind}')} is missing")
    return [tensors[f"{module}.{kind}"] for kind in kinds]


def _key(module: str, config: LoraConfig) -> str:
    """Return the name that patterns are matched against."""
    parameter = f"{module}.weight"
    is_parameter = any(f".{parameter}".endswith(f".{target}") for target in config.target_parameters)
    return parameter if is_parameter else module


def parse_config(text: bytes) -> LoraConfig:
    """Parse and check the configuration. Raises AdapterError and UnsupportedTypeError."""
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"invalid adapter: {CONFIG} is not JSON") from error
    if not isinstance(config, dict):
        raise AdapterError(f"invalid adapter: {CONFIG} is not an object")
    _refuse_type(config.get("peft_type"))
    _refuse_variants(config)
    return LoraConfig(
        ranks=_patterns(config, "rank_pattern", "r", DEFAULT_RANK, _rank),
        alphas=_patterns(config, "alpha_pattern", "lora_alpha", DEFAULT_ALPHA, _number),
        uses_square_root=_flag(config, "use_rslora"),
        target_parameters=_names(config, "target_parameters"),
        ties_head=_flag(config, "ensure_weight_tying"),
        module_patterns=dict(_module_patterns(config)),
    )


def _refuse_type(kind: object) -> None:
    if not isinstance(kind, str):
        raise AdapterError(f"invalid adapter: {CONFIG} has no peft_type")
    if kind != LORA:
        raise UnsupportedTypeError(f"adapter type {quote(kind)} is not currently supported")


def _refuse_variants(config: Mapping[str, Any]) -> None:
    for key, what in _REFUSED.items():
        if config.get(key):
            raise AdapterError(f"{what} is not supported")
    if config.get("bias") not in (None, "none"):
        raise AdapterError("trained biases (bias) are not supported")
    init = config.get("init_lora_weights")
    if not any(init is plain or (isinstance(init, str) and init == plain) for plain in _PLAIN_INITS):
        raise AdapterError("an init_lora_weights that changes the model's own weights is not supported")


def _rank(key: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 1 << 31:
        raise _invalid(key)
    return value


def _number(key: str, value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < 1e30:
        raise _invalid(key)
    return float(value)


def _flag(config: Mapping[str, Any], key: str) -> bool:
    value = config.get(key) or False
    if not isinstance(value, bool):
        raise _invalid(key)
    return value


def _patterns(
    config: Mapping[str, Any],
    key: str,
    default_key: str,
    default: Value,
    check: Callable[[str, object], Value],
) -> Patterns[Value]:
    values = config.get(key) or {}
    if not isinstance(values, dict):
        raise _invalid(key)
    checked = {pattern: check(key, value) for pattern, value in values.items()}
    return Patterns(key, checked, check(default_key, config.get(default_key, default)))


def _module_patterns(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key in ("target_modules", "exclude_modules"):
        if not isinstance(config.get(key), str):
            _names(config, key)
        elif config[key] != _ALL_LINEAR:
            yield key, config[key]


def _names(config: Mapping[str, Any], key: str) -> tuple[str, ...]:
    value = config.get(key) or []
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise _invalid(key)
    return tuple(value)


def _invalid(key: str) -> AdapterError:
    return AdapterError(f"invalid adapter: {key} of {CONFIG} is not valid")
