"""Converts values of vLLM's options to texts of the service's own options."""

import json
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

SEPARATOR = "\n"
"""Separates the values of a flag that takes several. No value contains it."""
# The option's own type refuses longer numbers; Python does not read those of more than 4,300 digits.
_NUMBER = re.compile(r"(\d{1,100}(?:\.\d{1,100})?)([kKmMgGtT]?)")
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_SCHEMES = {"gptq_marlin": "gptq", "awq_marlin": "awq", "gguf": ""}
_ENGINES = {"auto": "", "vllm": "tgis_native", "transformers": "hf_transformers"}


def to_number(text: str) -> str:
    """Return a number with the suffix k, m, g or t, where capital letters mean powers of 1024, as digits."""
    found = _NUMBER.fullmatch(text)
    if found is None:
        return text  # the option's own type refuses it
    number, suffix = found.groups()
    base = 1024 if suffix.isupper() else 1000
    scaled = Fraction(number) * base ** _POWERS[suffix.lower()]
    if scaled.denominator != 1:
        raise ValueError("it is no whole number")
    return str(scaled.numerator)


def to_length(text: str) -> str:
    """Return the length of a sequence; `auto` and -1 leave it to the model."""
    return "" if text in ("auto", "-1") else to_number(text)


def to_scheme(text: str) -> str:
    return _SCHEMES.get(text, text)


def to_engine(text: str) -> str:
    if text not in _ENGINES:
        raise ValueError(f"it is none of {', '.join(_ENGINES)}")
    return _ENGINES[text]


def to_origins(text: str) -> str:
    """Return a JSON list of origins as texts with commas."""
    origins = _read_json(text)
    if not isinstance(origins, list) or not all(isinstance(each, str) for each in origins):
        raise ValueError('it is no JSON list of texts, such as ["*"]')
    return ",".join(origins)


def to_adapters(text: str) -> str:
    """Return adapters as NAME=DIRECTORY with commas. Each is NAME=DIRECTORY here too, or a JSON object, or
    all are a JSON list of objects."""
    adapters: list[str] = []
    for one in filter(None, text.split(SEPARATOR)):
        if one.lstrip().startswith(("{", "[")):
            found = _read_json(one)
            adapters += map(_adapter, found if isinstance(found, list) else [found])
        elif "=" in one and "," not in one:
            adapters.append(one)
        else:
            raise ValueError("an adapter is NAME=DIRECTORY or a JSON object with name and path")
    return ",".join(adapters)


def to_drafts(text: str) -> str:
    """Return the number of tokens that a configuration of speculative decoding guesses from the text."""
    found = _read_json(text)
    method = found.get("method") or found.get("model") if isinstance(found, dict) else None
    number = found.get("num_speculative_tokens") if isinstance(found, dict) else None
    if method not in ("ngram", "[ngram]") or type(number) is not int:
        raise ValueError("only the method ngram with num_speculative_tokens is served")
    return str(number)


def to_graphs(text: str) -> str:
    """Return the list of no CUDA graphs if eager mode is wanted."""
    return "0" if text.lower() in ("true", "1") else ""


def to_level(text: str) -> str:
    """Return a level of Python's logging as one of the service's."""
    return {"critical": "error", "trace": "debug"}.get(text.lower(), text.lower())


def only(name: str, allowed: str, advice: str) -> Callable[[str], str | None]:
    """Return a check that refuses every value of `--name` except the allowed ones, which `|` separates."""

    def refuse(text: str) -> str | None:
        flag = name.replace("_", "-")
        return None if text in allowed.split("|") else f"--{flag}: {text!r} is not served: {advice}"

    return refuse


def at_most(name: str, most: int, advice: str) -> Callable[[str], str | None]:
    """Return a check that refuses values of `--name` that are no number from 0 to `most`."""

    def refuse(text: str) -> str | None:
        is_served = text.isdecimal() and float(text) <= most
        return None if is_served else f"--{name.replace('_', '-')}: {text!r} is not served: {advice}"

    return refuse


def _adapter(found: Any) -> str:
    name = found.get("name") if isinstance(found, dict) else None
    path = found.get("path") if isinstance(found, dict) else None
    if not isinstance(name, str) or not isinstance(path, str) or {",", "\0"} & {*name, *path}:
        raise ValueError("an object has a name and a path, without commas and U+0000")
    return f"{name}={path}"


def _read_json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError("it is no JSON") from error
