"""Converts the values of vLLM's options to texts for the service's own options."""

import json
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from tgis.config.serving import MIN_PRIORITY

SEPARATOR = "\n"
"""Separator for the values of a flag that accepts several. No value contains it."""
# The option's own type refuses longer numbers; int() refuses more than 4,300 digits.
_NUMBER = re.compile(r"(\d{1,100}(?:\.\d{1,100})?)([kKmMgGtT]?)")
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_SCHEMES = {"gptq_marlin": "gptq", "awq_marlin": "awq", "gguf": ""}
_FLOORS = {"fcfs": "0", "priority": str(MIN_PRIORITY)}
_NGRAM = ("ngram", "[ngram]")
_SPECULATORS = ("mlp_speculator", "medusa", "eagle", "eagle3", "draft_model")
# Releases had a method for each family.
_MTP = ("mtp", "deepseek_mtp", "mimo_mtp", "glm4_moe_mtp", "qwen3_next_mtp", "qwen3_5_mtp")
_ENGINES = {"auto": "", "vllm": "tgis_native", "transformers": "hf_transformers"}


def to_number(text: str) -> str:
    """Expand a number's suffix k, m, g or t to digits. Capital letters mean powers of 1024."""
    match = _NUMBER.fullmatch(text)
    if match is None:
        return text  # the option's own type refuses it
    number, suffix = match.groups()
    base = 1024 if suffix.isupper() else 1000
    scaled = Fraction(number) * base ** _POWERS[suffix.lower()]
    if scaled.denominator != 1:
        raise ValueError("it is not a whole number")
    return str(scaled.numerator)


def to_length(text: str) -> str:
    """Return the length of a sequence, or an empty text for `auto` and -1, which mean the model's length."""
    return "" if text in ("auto", "-1") else to_number(text)


def to_scheme(text: str) -> str:
    return _SCHEMES.get(text, text)


def to_engine(text: str) -> str:
    if text not in _ENGINES:
        raise ValueError(f"it is not one of {', '.join(_ENGINES)}")
    return _ENGINES[text]


def to_floor(text: str) -> str:
    """Convert a scheduling policy to a priority floor."""
    if text not in _FLOORS:
        raise ValueError(f"it is not one of {', '.join(_FLOORS)}")
    return _FLOORS[text]


def to_origins(text: str) -> str:
    """Convert a JSON list of origins to a comma-separated list."""
    origins = _read_json(text)
    if not isinstance(origins, list) or not all(isinstance(each, str) for each in origins):
        raise ValueError('it is not a JSON list of strings, such as ["*"]')
    return ",".join(origins)


def to_adapters(text: str) -> str:
    """Convert adapters to a comma-separated list of NAME=DIRECTORY.

    Each value is NAME=DIRECTORY, a JSON object or a JSON list of objects."""
    adapters: list[str] = []
    for one in filter(None, text.split(SEPARATOR)):
        if one.lstrip().startswith(("{", "[")):
            parsed = _read_json(one)
            adapters += map(_adapter, parsed if isinstance(parsed, list) else [parsed])
        elif "=" in one and "," not in one:
            adapters.append(one)
        else:
            raise ValueError("an adapter is NAME=DIRECTORY or a JSON object with name and path")
    return ",".join(adapters)


def to_drafts(text: str) -> str:
    """Return the number of draft tokens in a JSON configuration of speculation; empty if it has none."""
    config = _read_speculation(text)
    number = config.get("num_speculative_tokens")
    if number is None and find_speculator(text):
        return ""
    if type(number) is not int:
        raise ValueError("num_speculative_tokens is not a number")
    return str(number)


def find_speculator(text: str) -> dict[str, str]:
    """Return the options for the speculator in a JSON configuration of speculation; empty for the method
    ngram."""
    config = _read_speculation(text)
    method = config.get("method")
    model = config.get("model")
    if method in _NGRAM or (method is None and model in _NGRAM):
        return {}
    if method in _MTP and model is None:
        return {"speculator": "mtp"}
    if method not in (None, *_SPECULATORS) or not isinstance(model, str) or not model:
        known = ", ".join(_SPECULATORS)
        raise ValueError(f"only ngram, mtp, and with a model {known} are supported")
    return {"speculator": model}


def to_speculator(text: str) -> str:
    """Return the name of a speculator, empty for n-gram speculation."""
    return "" if text in _NGRAM else text


def _read_speculation(text: str) -> dict[str, object]:
    config = _read_json(text)
    if not isinstance(config, dict):
        raise ValueError("it is not a JSON object")
    return config


def to_graphs(text: str) -> str:
    """Return the value of --cuda-graphs that disables graphs if `text` enables eager mode."""
    return "0" if text.lower() in ("true", "1") else ""


def to_level(text: str) -> str:
    """Convert a Python logging level to one of the service's levels."""
    return {"critical": "error", "trace": "debug"}.get(text.lower(), text.lower())


def only(name: str, allowed: str, advice: str) -> Callable[[str], str | None]:
    """Return a check that refuses values of `--name` not in `allowed`, a list separated by `|`."""

    def refuse(text: str) -> str | None:
        flag = name.replace("_", "-")
        return None if text in allowed.split("|") else f"--{flag}: {text!r} is not supported: {advice}"

    return refuse


def at_most(name: str, maximum: int, advice: str) -> Callable[[str], str | None]:
    """Return a check that refuses values of `--name` other than whole numbers from 0 to `maximum`."""

    def refuse(text: str) -> str | None:
        is_supported = text.isdecimal() and float(text) <= maximum
        return None if is_supported else f"--{name.replace('_', '-')}: {text!r} is not supported: {advice}"

    return refuse


def _adapter(parsed: Any) -> str:
    name = parsed.get("name") if isinstance(parsed, dict) else None
    path = parsed.get("path") if isinstance(parsed, dict) else None
    if not isinstance(name, str) or not isinstance(path, str) or {",", "\0"} & {*name, *path}:
        raise ValueError("an object must have a name and a path, without commas and U+0000")
    return f"{name}={path}"


def _read_json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError("it is not JSON") from error
