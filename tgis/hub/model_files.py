"""Reads a model's JSON files and the sizes of its weights."""

import json
import reprlib
from collections.abc import Iterator, Mapping
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any

from tgis.config.model import DTYPES
from tgis.errors import OperatorError

# The first of these keys with a positive integer in config.json, or else in its text_config, gives the
# model's sequence length.
LENGTH_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)
DEFAULT_LENGTH = 2048
MAX_TOKEN_ID = 2**31 - 1
OTHER_WEIGHT_FILES = ("*.safetensors", "*.bin", "*.onnx")  # than GGUF files
WEIGHT_FILES = (*OTHER_WEIGHT_FILES, "*.gguf")
# Names or patterns of tokenizer files that can be converted if there is no tokenizer.json.
TOKENIZER_FILES = ("*.model", "*.tiktoken", "vocab.json", "vocab.txt", "tekken.json")


class ModelNotFoundError(OperatorError):
    """Error for a name without a usable model; its text is one line with the reason."""


def has_tokenizer_to_convert(directory: Path) -> bool:
    """Return True if there are tokenizer files in a format other than tokenizer.json."""
    return any(any(directory.glob(pattern)) for pattern in TOKENIZER_FILES)


def is_complete(directory: Path) -> bool:
    """Return True if config.json and a complete set of weights exist. Raises ModelNotFoundError."""
    has_config = (directory / "config.json").is_file()
    return has_config and any(_has_weights(directory, pattern) for pattern in WEIGHT_FILES)


def _has_weights(directory: Path, pattern: str) -> bool:
    """Return True if files match the pattern, and all files of an index exist if there is one."""
    indices = [read_json(directory, path.name) for path in directory.glob(f"{pattern}.index.json")]
    if not indices:
        return any(path.is_file() for path in directory.glob(pattern))
    named = [index.get("weight_map") for index in indices]
    return any(
        isinstance(files, dict) and all((directory / str(name)).is_file() for name in {*files.values()})
        for files in named
    )


def fingerprint(directory: Path) -> str:
    """Hash configuration, names and sizes of weight files to 16 hex digits. Raises ModelNotFoundError."""
    files = sorted(path for pattern in WEIGHT_FILES for path in directory.glob(pattern))
    sizes = [(path.name, _size(path)) for path in files]
    text = json.dumps([read_json(directory, "config.json"), sizes], sort_keys=True)
    return sha256(text.encode()).hexdigest()[:16]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:  # for example a broken link in the hub cache
        raise ModelNotFoundError(f"{path} cannot be read: {error.strerror}") from error


def read_config(directory: Path) -> dict[str, Any]:
    """Return the model's config.json, which must name a model type. Raises ModelNotFoundError."""
    config = read_json(directory, "config.json")
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise ModelNotFoundError(
            f"{directory / 'config.json'} has no model_type, the name of the model's architecture"
        )
    return config


def read_json(directory: Path, name: str) -> dict[str, Any]:
    """Return the JSON object in a model's file; empty if there is no such file. Raises ModelNotFoundError."""
    path = directory / name
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelNotFoundError(f"{path} cannot be read: {error.strerror}") from error
    except RecursionError as error:
        raise ModelNotFoundError(f"{path} is nested too deep to be read") from error
    except ValueError as error:
        raise ModelNotFoundError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelNotFoundError(f"{path} is not a JSON object")
    return content


def length_of_model(config: Mapping[str, Any]) -> int | None:
    """Return the model's sequence length in tokens, that of its text_config if it is multimodal; None if
    config.json does not give it."""
    inner = config.get("text_config")
    places = (config, inner if isinstance(inner, dict) else {})
    values = (place.get(key) for place in places for key in LENGTH_KEYS)
    return next((value for value in values if type(value) is int and value > 0), None)  # no booleans


def max_sequence_length(config: Mapping[str, Any]) -> int:
    return length_of_model(config) or DEFAULT_LENGTH


def stored_dtype(config: Mapping[str, Any]) -> str:
    """Return the dtype in config.json, else in its text_config; float32 if that is not one of DTYPES."""
    inner = config.get("text_config")
    places = (config, inner if isinstance(inner, dict) else {})
    named = (place.get(key) for place in places for key in ("dtype", "torch_dtype"))
    name = next((name for name in named if name), None)
    return name if isinstance(name, str) and name in DTYPES else DTYPES[0]


def eos_token_ids(directory: Path) -> list[int]:
    """Return the end-of-sequence ids of config.json, its text_config and generation_config.json, each once.

    Raises ModelNotFoundError for a value that is not an id."""
    ids: dict[int, None] = {}
    for name in ("config.json", "generation_config.json"):
        content = read_json(directory, name)
        for place in (content, content.get("text_config")):
            if isinstance(place, dict):
                ids |= dict.fromkeys(_read_ids(directory / name, place.get("eos_token_id")))
    return list(ids)


def _read_ids(path: Path, value: object) -> Iterator[int]:
    """Yield the ids in a configuration's value; negative ids mean none."""
    for each in value if isinstance(value, list) else [] if value is None else [value]:
        if type(each) is not int or each > MAX_TOKEN_ID:
            shown = reprlib.repr(value)  # the list may have thousands of ids
            raise ModelNotFoundError(f"{path}: eos_token_id {shown} is not a token id or a list of token ids")
        if each >= 0:
            yield each


def pad_token_id(directory: Path, tokenizer: Path, vocab_size: int) -> int:
    """Return the first id inside the vocabulary among the pad token ids of config.json,
    generation_config.json and the files in `tokenizer`, the EOS token ids, and 0."""
    candidates = chain(_pad_token_ids(directory), _pad_tokens_of(tokenizer), eos_token_ids(directory))
    return next((id for id in candidates if type(id) is int and 0 <= id < vocab_size), 0)


def _pad_token_ids(directory: Path) -> Iterator[object]:
    config = read_json(directory, "config.json")
    for place in (config, config.get("text_config"), read_json(directory, "generation_config.json")):
        if isinstance(place, dict):
            yield place.get("pad_token_id")


def _pad_tokens_of(tokenizer: Path) -> Iterator[object]:
    """Yield the ids in tokenizer.json of the pad token named by the tokenizer's configuration."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        token = read_json(tokenizer, name).get("pad_token")
        content = token.get("content") if isinstance(token, dict) else token
        added = read_json(tokenizer, "tokenizer.json").get("added_tokens") if content else None
        for one in added if isinstance(added, list) else ():
            if isinstance(one, dict) and one.get("content") == content:
                yield one.get("id")
