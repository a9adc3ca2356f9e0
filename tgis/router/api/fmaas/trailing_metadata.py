"""Builds the trailing metadata of a successful call: times and token counts that fmaas's messages lack."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from tgis.router.engine.handle import SequenceSpec
from tgis.router.events import Output, Timings


class CallEnd(NamedTuple):
    """End of one input's generation."""

    spec: SequenceSpec
    last: Output

    @property
    def timings(self) -> Timings:
        assert self.last.timings is not None, "the last output has timings"
        return self.last.timings


class TrailingKey(NamedTuple):
    help: str
    value: Callable[[Sequence[CallEnd]], int | float | None]
    """Computes the value from the ends of all inputs, times in seconds. None omits the key."""


def _first_token_s(ends: Sequence[CallEnd]) -> float | None:
    times = [end.timings.first_token_s for end in ends]
    return max((each for each in times if each is not None), default=None)


TRAILING_KEYS: Mapping[str, TrailingKey] = {
    "tgis-queue-ms": TrailingKey(
        "until its first step", lambda ends: max((end.timings.queue_s for end in ends), default=0.0)
    ),
    "tgis-first-token-ms": TrailingKey("until its first token; absent if no input has one", _first_token_s),
    "tgis-total-ms": TrailingKey(
        "until its end", lambda ends: max((end.timings.total_s for end in ends), default=0.0)
    ),
    "tgis-prompt-tokens": TrailingKey(
        "input tokens", lambda ends: sum(len(end.spec.input_ids) for end in ends)
    ),
    "tgis-cached-tokens": TrailingKey(
        "input tokens that the prefix cache had", lambda ends: sum(end.last.num_cached for end in ends)
    ),
    "tgis-generated-tokens": TrailingKey(
        "generated tokens", lambda ends: sum(end.last.num_generated for end in ends)
    ),
}


def trailing_metadata(ends: Iterable[CallEnd]) -> tuple[tuple[str, str], ...]:
    """Return keys and values: sums, and the slowest input's times since acceptance, in milliseconds."""
    ends = list(ends)
    values = ((name, key.value(ends)) for name, key in TRAILING_KEYS.items())
    return tuple((name, _write(value)) for name, value in values if value is not None)


def _write(value: int | float) -> str:
    return str(value) if isinstance(value, int) else f"{1000 * value:.3f}"
