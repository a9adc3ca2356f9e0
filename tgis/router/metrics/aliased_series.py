"""Series under the names of another server, beside the service's own (`--metrics-alias`)."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from tgis.router.events import Timings
from tgis.router.metrics.gauges import Gauge
from tgis.router.metrics.metric_types import Counter, Histogram, Series
from tgis.router.metrics.storage import Storage


class CacheShape(NamedTuple):
    block_size: int
    num_blocks: int


class LoraUse(NamedTuple):
    """Ids of the LoRA adapters of running and of waiting sequences."""

    maximum: int
    """Maximum number of adapters in use at once."""
    running: Sequence[str]
    waiting: Sequence[str]


class AliasedMetrics(Protocol):
    """Series of the service that others show."""

    queue_size: Gauge
    requests_running: Gauge
    kv_cache_usage: Gauge
    prefix_cache_queries: Counter
    prefix_cache_hits: Counter
    preemptions: Counter
    drafts: Counter
    drafted_rows: Counter
    accepted_drafts: Counter
    accepted_by_position: Counter
    request_success: Counter
    request_failure: Counter
    request_max_new_tokens: Histogram
    request_generated_tokens: Histogram
    request_duration: Histogram
    request_queue_duration: Histogram
    request_inference_duration: Histogram
    first_token_duration: Histogram
    inter_token_duration: Histogram


class AliasedCall(Protocol):
    """Observer of the texts of one call."""

    def finish(self, index: int, num_input_tokens: int, num_generated: int, timings: Timings) -> None:
        """Observe the text at `index`, counted from 0; the texts of an input follow each other."""


class AliasedSeries(Protocol):
    series: list[Series]

    def begin(self, num_input_tokens: int) -> None:
        """Count the input tokens of a text that has its first token."""

    def call(self, num_texts: int) -> AliasedCall:
        """Begin a call that generates so many texts for each input."""

    def observe_step(self, num_tokens: int) -> None:
        """Observe the number of tokens that a step computed."""

    def follow_cache(self, read: Callable[[], CacheShape]) -> None: ...

    def follow_loras(self, read: Callable[[], LoraUse]) -> None: ...


MakeAliases = Callable[[AliasedMetrics, Storage], AliasedSeries]
"""Makes the series from the service's own, with a storage for what the service does not observe."""
