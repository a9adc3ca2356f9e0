"""Reads the `tgis-*` metadata of a call: parameters that fmaas's messages lack. They apply to all inputs of
the call. All other keys are ignored."""

import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, NamedTuple

from tgis.router.api.grpc.priority_metadata import ALLOWED_PRIORITY, PRIORITY, PRIORITY_KEY
from tgis.router.errors import RequestError
from tgis.router.requests.call import Metadata
from tgis.router.requests.parameters import (
    MAX_BIAS,
    MAX_CACHE_SALT_BYTES,
    MAX_LOGIT_BIASES,
    MAX_STOP_TOKEN_IDS,
    RULES,
    Parameters,
)
from tgis.sampling_parameters import SHARED, Parameter

PREFIX = "tgis-"
MAX_SHOWN_CHARS = 64  # maximum length of a key in an error's text, because a client may send any key

# Patterns accept only ASCII digits and bound every number, so that parsing costs no more than reading.
_ID = "[0-9]{1,9}"
_NUMBER = r"-?[0-9]{1,30}(?:\.[0-9]{1,30})?(?:[eE][+-]?[0-9]{1,3})?"


class MetadataKey(NamedTuple):
    field: str
    """Target of the value: a field of Parameters, `inputs_are_ids` or `tokens_are_ids`."""
    pattern: re.Pattern[Any]
    """Pattern of valid values."""
    read: Callable[[Any], Any]
    show: Callable[[Any], str]
    """Formats a value for the log: numbers in full, lists by count, salts by size."""
    allowed: str
    """Description of the valid values for error texts."""
    help: str


def _list_of(item: str, max_items: int) -> re.Pattern[str]:
    return re.compile(f"{item}(?:,{item}){{0,{max_items - 1}}}")


def _number(parameter: Parameter) -> MetadataKey:
    assert parameter.range is not None, "shared parameters have a range"
    scope = "; no effect with GREEDY" if parameter.random_only else ""
    help = f"{parameter.help[0].lower()}{parameter.help[1:]}{scope}"
    return MetadataKey(
        parameter.name,
        re.compile(_NUMBER),
        float,
        "{:.6g}".format,
        "a decimal number, such as 0.5",
        f"{help}; {parameter.range.low:g} to {parameter.range.high:g}",
    )


def _choice(field: str, yes: str, no: str, help: str) -> MetadataKey:
    def show(value: bool) -> str:
        return yes if value else no

    return MetadataKey(field, re.compile(f"{yes}|{no}"), yes.__eq__, show, f"`{yes}` or `{no}`", help)


def _count(values: tuple[Any, ...]) -> str:
    return str(len(values))


def _size(salt: bytes) -> str:
    return f"{len(salt)} bytes"


def _biases(text: str) -> tuple[tuple[int, float], ...]:
    parts = re.split("[:,]", text)
    return tuple(zip(map(int, parts[::2]), map(float, parts[1::2]), strict=True))


def _token_ids(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


KEYS: Mapping[str, MetadataKey] = {
    "tgis-logit-bias": MetadataKey(
        "logit_bias",
        _list_of(f"{_ID}:{_NUMBER}", MAX_LOGIT_BIASES),
        _biases,
        _count,
        f"1 to {MAX_LOGIT_BIASES} token ids with their values, such as 17:-100,42:1.5",
        f"added to the logits of these tokens; each id once, values from -{MAX_BIAS} to {MAX_BIAS}",
    ),
    **{each.metadata_key: _number(each) for each in SHARED},
    "tgis-stop-token-ids": MetadataKey(
        "stop_token_ids",
        _list_of(_ID, MAX_STOP_TOKEN_IDS),
        _token_ids,
        _count,
        f"1 to {MAX_STOP_TOKEN_IDS} token ids, such as 5,6",
        "tokens that end a text as the end of sequence does: the reason is EOS_TOKEN, the text lacks them, "
        "and `min_new_tokens` forbids them",
    ),
    "tgis-ignore-eos": _choice(
        "ignore_eos",
        "true",
        "false",
        "whether the model's own end of sequence does not end a text; no effect with guided decoding",
    ),
    "tgis-watermark": _choice(
        "watermark",
        "true",
        "false",
        "whether to watermark the text (Kirchenbauer et al. 2023), with the server's `--watermark-gamma` and "
        "`--watermark-delta`",
    ),
    "tgis-cache-salt": MetadataKey(
        "cache_salt",
        re.compile(f"[ -~]{{1,{MAX_CACHE_SALT_BYTES}}}"),
        str.encode,
        _size,
        f"1 to {MAX_CACHE_SALT_BYTES} characters of printable ASCII",
        "only calls with the same salt share cached prompts, so that other clients cannot detect prompts by "
        "timing",
    ),
    "tgis-cache-salt-bin": MetadataKey(
        "cache_salt",
        re.compile(b"(?s).{1,%d}" % MAX_CACHE_SALT_BYTES),
        bytes,
        _size,
        f"1 to {MAX_CACHE_SALT_BYTES} bytes",
        "the same, for any bytes; one of the two may be given",
    ),
    PRIORITY_KEY: MetadataKey(
        "priority",
        PRIORITY,
        int,
        str,
        ALLOWED_PRIORITY,
        "inputs of calls with lower values start first; values below the operator's `--priority-floor` count "
        "as the floor",
    ),
    "tgis-input": _choice(
        "inputs_are_ids",
        "ids",
        "text",
        "whether each input's text is token ids, decimal and with one space between each two; no special "
        "tokens are added; also of Tokenize",
    ),
    "tgis-tokens": _choice(
        "tokens_are_ids",
        "ids",
        "text",
        "whether every token's `text` in the answer is its decimal id and not the vocabulary's piece; also "
        "of Tokenize",
    ),
}

_PARAMETERS = {field.name for field in fields(Parameters)}


class CallMetadata(NamedTuple):
    """Metadata of a call, with the parsed values of its `tgis-*` keys."""

    headers: Metadata = ()
    """All metadata, as received."""
    values: Mapping[str, Any] = {}
    """Values by key."""
    refusal: str = ""
    """Error of the first invalid key; empty if all keys are valid."""

    @property
    def parameters(self) -> dict[str, Any]:
        """Values by field of Parameters."""
        return {
            KEYS[key].field: value for key, value in self.values.items() if KEYS[key].field in _PARAMETERS
        }

    @property
    def inputs_are_ids(self) -> bool:
        return bool(self.values.get("tgis-input"))

    @property
    def tokens_are_ids(self) -> bool:
        return bool(self.values.get("tgis-tokens"))

    def describe(self) -> list[str]:
        """Return the keys and values in the form in which the log shows them."""
        return [f"{key}={KEYS[key].show(value)}" for key, value in self.values.items()]


def read_metadata(headers: Metadata) -> CallMetadata:
    """Read the `tgis-*` keys, up to the first invalid one."""
    values: dict[str, Any] = {}
    try:
        for key, value in headers:
            if key.startswith(PREFIX):
                _read(key, value, values)
    except RequestError as error:
        return CallMetadata(headers, values, str(error))
    return CallMetadata(headers, values)


def _read(name: str, text: str | bytes, values: dict[str, Any]) -> None:
    """Add the key's value to `values`. Raises RequestError, whose text never contains the value."""
    key = KEYS.get(name)
    if key is None:
        shown = re.sub("[^!-~]", "?", name[:MAX_SHOWN_CHARS])
        raise RequestError(f"{shown}: unknown metadata key; the known ones are {', '.join(KEYS)}")
    for other in values:
        if KEYS[other].field == key.field:
            raise RequestError(f"{name}: given twice" if other == name else f"{name}: {other} is given too")
    if not key.pattern.fullmatch(text):
        raise RequestError(f"{name} must be {key.allowed}")
    value = key.read(text)
    rule = RULES.get(key.field)
    if rule is not None and not rule.allows(value):
        raise RequestError(f"{name}: {rule.refusal}")
    values[name] = value
