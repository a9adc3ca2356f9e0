"""What PEFT's adapter_config.json says of a LoRA adapter. What would change the answers in a way that we do
not follow is refused, never left out."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import regex

from tgis.prompts.errors import ContentError, quote

NAME = "adapter_config.json"
STEM = "adapter_model"
WEIGHTS = (f"{STEM}.safetensors", f"{STEM}.bin")  # beside it; the first of them that is there
LORA = "LORA"
MAX_CONFIG_BYTES = 4 << 20
# PEFT's own, where a configuration lacks them.
DEFAULT_RANK = DEFAULT_ALPHA = 8
# Ways to begin that leave the model as it was; the others subtract from its weights what they begin with.
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
# Patterns are an adapter's own; none that is meant well takes long.
_PATTERN_TIMEOUT_S = 1.0
MAX_PATTERNS = 4096  # of either kind; every module is held against all of them


Value = TypeVar("Value")


class UnsupportedTypeError(ContentError):
    """Not LoRA; the text is all that a client is told."""


class Patterns(Generic[Value]):
    """What some of an adapter's modules have instead of what all have."""

    def __init__(self, values: Mapping[str, Value]) -> None:
        """Raises ContentError where a pattern is none."""
        self._values = values
        if len(values) > MAX_PATTERNS:
            raise _wrong("rank_pattern or alpha_pattern")
        try:
            self._compiled = [(regex.compile(rf"(.*\.)?({pattern})$"), values[pattern]) for pattern in values]
        except regex.error as error:
            raise _wrong("rank_pattern or alpha_pattern") from error

    def find(self, key: str, default: Value) -> Value:
        """Of the first pattern that is the end of `key`, whole parts of its path. Raises ContentError."""
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
        """`key` is the name of a module or, among the target parameters, of a parameter. Raises
        ContentError."""
        return self.ranks.find(key, self.rank)

    def scale_of(self, key: str, rank: int) -> float:
        """Of what has that rank. Raises ContentError."""
        alpha = self.alphas.find(key, self.alpha)
        return alpha / (math.sqrt(rank) if self.uses_square_root else rank)


def parse_config(text: bytes) -> LoraConfig:
    """Raises ContentError, UnsupportedTypeError."""
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
