"""Parses PEFT's adapter_config.json of a LoRA adapter.

A setting that would change the output in a way that we do not implement is refused, never ignored."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import regex

from tgis.prompts.errors import ContentError, quote

NAME = "adapter_config.json"
STEM = "adapter_model"
WEIGHTS = (f"{STEM}.safetensors", f"{STEM}.bin")  # next to the configuration; the first that exists is used
LORA = "LORA"
MAX_CONFIG_BYTES = 4 << 20
# PEFT's defaults, for a configuration that lacks these settings.
DEFAULT_RANK = DEFAULT_ALPHA = 8
# Initialisations that leave the model's weights unchanged. The others subtract the adapter's initial product
# from the weights.
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
# Patterns come from the adapter. No benign pattern takes as long.
_PATTERN_TIMEOUT_S = 1.0
MAX_PATTERNS = 4096  # of ranks, and of alphas; every module is matched against all of them


Value = TypeVar("Value")


class UnsupportedTypeError(ContentError):
    """Error for an adapter that is not LoRA. The client gets this text without a prefix."""


class Patterns(Generic[Value]):
    """Values of single modules that override the adapter's default value, by patterns of names."""

    def __init__(self, values: Mapping[str, Value]) -> None:
        """Compile the patterns. Raises ContentError for an invalid pattern, and for too many patterns."""
        self._values = values
        if len(values) > MAX_PATTERNS:
            raise _wrong("rank_pattern or alpha_pattern")
        try:
            self._compiled = [(regex.compile(rf"(.*\.)?({pattern})$"), values[pattern]) for pattern in values]
        except regex.error as error:
            raise _wrong("rank_pattern or alpha_pattern") from error

    def find(self, key: str, default: Value) -> Value:
        """Return the value of the first pattern that matches `key` or its last dotted parts, else `default`.

        Raises ContentError."""
        for pattern, value in self._compiled:
            try:
                if pattern.match(key, timeout=_PATTERN_TIMEOUT_S, concurrent=True):
                    return value
            except TimeoutError as error:
                raise _wrong("rank_pattern or alpha_pattern") from error
        return self._values.get(key, default)


@dataclass(frozen=True)
class LoraConfig:
    rank: int
    alpha: float
    ranks: Patterns[int]
    alphas: Patterns[float]
    uses_square_root: bool
    target_parameters: tuple[str, ...]
    ties_head: bool

    def rank_of(self, key: str) -> int:
        """Return the rank of a module or, if it is a target parameter, of a parameter. `key` is its name.

        Raises ContentError."""
        return self.ranks.find(key, self.rank)

    def scale_of(self, key: str, rank: int) -> float:
        """Return the factor of the module's or parameter's low-rank product. Raises ContentError."""
        alpha = self.alphas.find(key, self.alpha)
        return alpha / (math.sqrt(rank) if self.uses_square_root else rank)


def parse_config(text: bytes) -> LoraConfig:
    """Parse and check the configuration. Raises ContentError and UnsupportedTypeError."""
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ContentError(f"invalid adapter: {NAME} is not JSON") from error
    if not isinstance(config, dict):
        raise ContentError(f"invalid adapter: {NAME} is not an object")
    _refuse_type(config.get("peft_type"))
    _refuse_variants(config)
    return LoraConfig(
        rank=_rank("r", config.get("r", DEFAULT_RANK)),
        alpha=_number("lora_alpha", config.get("lora_alpha", DEFAULT_ALPHA)),
        ranks=Patterns({key: _rank("rank_pattern", value) for key, value in _object(config, "rank_pattern")}),
        alphas=Patterns(
            {key: _number("alpha_pattern", value) for key, value in _object(config, "alpha_pattern")}
        ),
        uses_square_root=_flag(config, "use_rslora"),
        target_parameters=_names(config, "target_parameters"),
        ties_head=_flag(config, "ensure_weight_tying"),
    )


def _refuse_type(kind: object) -> None:
    if not isinstance(kind, str):
        raise ContentError(f"invalid adapter: {NAME} has no peft_type")
    if kind != LORA:
        raise UnsupportedTypeError(f"adapter type {quote(kind)} is not currently supported")


def _refuse_variants(config: Mapping[str, Any]) -> None:
    for key, what in _REFUSED.items():
        if config.get(key):
            raise ContentError(f"{what} is not supported")
    if config.get("bias") not in (None, "none"):
        raise ContentError("trained biases (bias) are not supported")
    init = config.get("init_lora_weights")
    if not any(init is plain or (isinstance(init, str) and init == plain) for plain in _PLAIN_INITS):
        raise ContentError("an init_lora_weights that changes the model's own weights is not supported")


def _rank(key: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 1 << 31:
        raise _wrong(key)
    return value


def _number(key: str, value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < 1e30:
        raise _wrong(key)
    return float(value)


def _flag(config: Mapping[str, Any], key: str) -> bool:
    value = config.get(key) or False
    if not isinstance(value, bool):
        raise _wrong(key)
    return value


def _object(config: Mapping[str, Any], key: str) -> list[tuple[str, Any]]:
    value = config.get(key) or {}
    if not isinstance(value, dict):
        raise _wrong(key)
    return list(value.items())


def _names(config: Mapping[str, Any], key: str) -> tuple[str, ...]:
    value = config.get(key) or []
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise _wrong(key)
    return tuple(value)


def _wrong(key: str) -> ContentError:
    return ContentError(f"invalid adapter: {key} of {NAME} makes no sense")
