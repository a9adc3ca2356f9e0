"""Rules of the parameters that TGIS lacks, declared once for all APIs. An API that reads one from a text
checks it at once, to refuse it by the name that its clients know; the validation checks every call."""

from collections.abc import Callable
from typing import Any, NamedTuple

from tgis.sampling_parameters import RANGES, Range

MAX_LOGIT_BIASES = 1024
MAX_BIAS = 100
MAX_STOP_TOKEN_IDS = 64
MAX_CACHE_SALT_BYTES = 256
NUM_SEEDS = 2**64  # other seeds, negative ones too, are taken modulo this where an API allows them


class Rule(NamedTuple):
    allows: Callable[[Any], bool]
    refusal: str


def _are_biases(biases: tuple[tuple[int, float], ...]) -> bool:
    num_ids = len({token_id for token_id, _ in biases})
    in_range = all(-MAX_BIAS <= bias <= MAX_BIAS for _, bias in biases)  # NaN is not
    return num_ids == len(biases) <= MAX_LOGIT_BIASES and in_range


RULES: dict[str, Rule | Range] = {
    **{name: RANGES[name] for name in ("min_p", "presence_penalty", "frequency_penalty")},
    "logit_bias": Rule(
        _are_biases,
        f"logit_bias must be at most {MAX_LOGIT_BIASES} token ids, each once, with values "
        f"from -{MAX_BIAS} to {MAX_BIAS}",
    ),
    "stop_token_ids": Rule(
        lambda token_ids: len(token_ids) <= MAX_STOP_TOKEN_IDS,
        f"stop_token_ids must be at most {MAX_STOP_TOKEN_IDS} token ids",
    ),
    "cache_salt": Rule(
        lambda salt: len(salt) <= MAX_CACHE_SALT_BYTES,
        f"cache_salt must be at most {MAX_CACHE_SALT_BYTES} bytes",
    ),
}
"""Rules by field of Parameters. A value of 0 and an empty one, which mean that it is not set, need none."""
