"""Defines series with vLLM's names, types, labels and buckets (`--metrics-alias vllm`), for dashboards and
autoscalers that use them. Most series are views of TGIS's series, so that both agree."""

import time
from collections import Counter as Tally
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from tgis.router.events import Timings
from tgis.router.metrics.aliased_series import AliasedMetrics, CacheShape, LoraUse
from tgis.router.metrics.gauges import Gauge, LabelledGauge
from tgis.router.metrics.metric_types import Counter, Histogram, Series
from tgis.router.metrics.storage import Labels, Storage
from tgis.router.sequence import StopReason

ENGINE = "0"  # the router has one engine
MODEL_LABELS = ("model_name", "engine")
LORA_LABELS = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")
CACHE_LABELS = ("block_size", "enable_prefix_caching", "engine", "model_name", "num_gpu_blocks")

STEP_TOKENS = (1, *(8 * 2**k for k in range(12)))
NUM_TEXTS = (1, 2, 5, 10, 20)
# vLLM's buckets in seconds.
FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
PER_TOKEN_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
PER_REQUEST_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)

FINISHED = {
    StopReason.EOS_TOKEN: "stop",
    StopReason.STOP_SEQUENCE: "stop",
    StopReason.MAX_TOKENS: "length",
    StopReason.TOKEN_LIMIT: "length",
    StopReason.TIME_LIMIT: "length",
    StopReason.CANCELLED: "abort",
    StopReason.ERROR: "error",
}
"""vLLM's finish reasons, the same as in OpenAI's API."""
FAILED = {"cancelled": "abort", "slow_reader": "abort", "generate": "error"}
"""vLLM's finish reasons for failures that it counts as finished requests."""


class CounterView:
    """View of counts kept elsewhere, exposed only with `_total`."""

    kind = "counter"

    def __init__(
        self, name: str, help: str, label_names: Labels, read: Callable[[], Mapping[Labels, float]]
    ) -> None:
        self.name = name
        self.help = help
        self.label_names = label_names
        self._read = read

    def collect(self) -> Iterable[Metric]:
        family = CounterMetricFamily(self.name, self.help, labels=self.label_names)
        for labels, value in self._read().items():
            family.add_metric(labels, value)
        return [family]


class GaugeView:
    """View of a gauge without labels, under another name and with labels."""

    kind = "gauge"
    label_names: Labels = MODEL_LABELS

    def __init__(self, name: str, help: str, source: Gauge, labels: Labels) -> None:
        self.name = name
        self.help = help
        self._source = source
        self._labels = labels

    def collect(self) -> Iterable[Metric]:
        family = GaugeMetricFamily(self.name, self.help, labels=self.label_names)
        family.add_metric(self._labels, self._source.value())
        return [family]


class HistogramView:
    """View of a histogram without labels, under another name, with labels and other buckets."""

    kind = "histogram"
    label_names: Labels = MODEL_LABELS

    def __init__(
        self, name: str, help: str, source: Histogram, bounds: Sequence[float], labels: Labels
    ) -> None:
        self.name = name
        self.help = help
        self.bounds = tuple(bounds)
        self._source = source
        self._labels = labels
        source.divide(bounds)

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(self.name, self.help, labels=self.label_names)
        family.add_metric(self._labels, *self._source.read(self.bounds))
        return [family]


class VllmSeries:
    """All series of vLLM. Values that no series of TGIS has are observed here. Views do not refer to this
    object or to all metrics, so that the end of a scrape frees its series and their mapped files."""

    def __init__(
        self, model_name: str, max_sequence_length: int, metrics: AliasedMetrics, storage: Storage
    ) -> None:
        self.series: list[Series] = []
        self._storage = storage
        self._prompt_tokens = Counter("prompt_tokens", "Input tokens of texts that have begun", (), storage)
        self._labels = (model_name, ENGINE)
        self._lengths = _one_two_five(max_sequence_length)
        self._declare_state(metrics)
        self._declare_counts(metrics)
        self._declare_drafts(metrics)
        self._declare_lengths(metrics)
        self._declare_intervals(metrics)
        self._declare_durations(metrics)

    def begin(self, num_input_tokens: int) -> None:
        """Count the input tokens of a text when it gets its first token."""
        self._prompt_tokens.add(amount=num_input_tokens)

    def call(self, num_texts: int) -> "VllmCall":
        """Begin a call with `num_texts` texts per input."""
        return VllmCall(self, num_texts)

    def observe_step(self, num_tokens: int) -> None:
        self.iteration_tokens.observe(num_tokens)

    def follow_cache(self, read: Callable[[], CacheShape]) -> None:
        def labels() -> dict[Labels, float]:
            shape = read()
            model_name, engine = self._labels
            return {(str(shape.block_size), "True", engine, model_name, str(shape.num_blocks)): 1.0}

        self._cache.follow(labels)

    def follow_loras(self, read: Callable[[], LoraUse]) -> None:
        def labels() -> dict[Labels, float]:
            use = read()
            if not use.maximum:
                return {}
            return {(str(use.maximum), ",".join(use.running), ",".join(use.waiting)): time.time()}

        self._loras.follow(labels)

    def _declare_state(self, metrics: AliasedMetrics) -> None:
        self._gauge("num_requests_running", "Inputs in the batch", metrics.requests_running)
        self._gauge("num_requests_waiting", "Inputs that wait for a place in the batch", metrics.queue_size)
        for name in ("kv_cache_usage_perc", "gpu_cache_usage_perc"):
            self._gauge(name, "Fraction of the cache's blocks in use, 0 to 1", metrics.kv_cache_usage)
        self._cache = self._info("cache_config_info", "1; the labels have the cache's shape", CACHE_LABELS)
        self._loras = self._info(
            "lora_requests_info",
            "Time of the scrape; the labels have the LoRA adapters of running and of waiting inputs, and the "
            "maximum number of adapters of the largest size in use at once; no series if it is 0",
            LORA_LABELS,
        )

    def _declare_counts(self, metrics: AliasedMetrics) -> None:
        for name in ("prefix_cache_queries", "gpu_prefix_cache_queries"):
            self._count(name, "Tokens looked up in the prefix cache", _total(metrics.prefix_cache_queries))
        for name in ("prefix_cache_hits", "gpu_prefix_cache_hits"):
            self._count(name, "Tokens found in the prefix cache", _total(metrics.prefix_cache_hits))
        self._count("num_preemptions", "Inputs put back into the queue", _total(metrics.preemptions))
        self._count("prompt_tokens", self._prompt_tokens.help, _total(self._prompt_tokens))
        tokens = metrics.first_token_duration, metrics.inter_token_duration
        self._count("generation_tokens", "Generated tokens", lambda: sum(each.count for each in tokens))
        labels = self._labels
        success = metrics.request_success
        failure = metrics.request_failure
        self._add(
            CounterView(
                "vllm:request_success",
                "Texts that ended (stop, length), were cancelled (abort) or failed (error)",
                (*MODEL_LABELS, "finished_reason"),
                lambda: {(*labels, reason): n for reason, n in _finished(success, failure).items()},
            )
        )

    def _declare_drafts(self, metrics: AliasedMetrics) -> None:
        names = (
            ("num_drafts", metrics.drafted_rows),
            ("num_draft_tokens", metrics.drafts),
            ("num_accepted_tokens", metrics.accepted_drafts),
        )
        for name, counter in names:
            self._count(f"spec_decode_{name}", counter.help, _total(counter))
        labels = self._labels
        by_position = metrics.accepted_by_position
        self._add(
            CounterView(
                "vllm:spec_decode_num_accepted_tokens_per_pos",
                by_position.help,
                (*MODEL_LABELS, "position"),
                lambda: {(*labels, position): n for (position,), n in by_position.values().items()},
            )
        )

    def _declare_lengths(self, metrics: AliasedMetrics) -> None:
        self.request_prompt_tokens = self._observed(
            "request_prompt_tokens", "Input tokens of each successful text", self._lengths
        )
        self._view(
            "request_generation_tokens",
            "Generated tokens of each successful text",
            metrics.request_generated_tokens,
            self._lengths,
        )
        self._view(
            "request_params_max_tokens",
            "max_new_tokens of each accepted input, as requested",
            metrics.request_max_new_tokens,
            self._lengths,
        )
        self.request_params_n = self._observed(
            "request_params_n", "Number of texts of each input whose texts all succeeded", NUM_TEXTS
        )
        self.request_max_num_generation_tokens = self._observed(
            "request_max_num_generation_tokens",
            "Generated tokens of the longest text of each input whose texts all succeeded",
            self._lengths,
        )
        self.iteration_tokens = self._observed(
            "iteration_tokens_total", "Tokens computed by a step", STEP_TOKENS
        )

    def _declare_intervals(self, metrics: AliasedMetrics) -> None:
        self._view(
            "time_to_first_token_seconds",
            "Seconds from acceptance to the first token",
            metrics.first_token_duration,
            FIRST_TOKEN_S,
        )
        for name in ("inter_token_latency_seconds", "time_per_output_token_seconds"):
            self._view(
                name, "Seconds between two tokens of a text", metrics.inter_token_duration, PER_TOKEN_S
            )
        self.request_time_per_output_token = self._observed(
            "request_time_per_output_token_seconds",
            "Mean seconds between two tokens of each successful text with at least two tokens",
            PER_TOKEN_S,
        )

    def _declare_durations(self, metrics: AliasedMetrics) -> None:
        for name, help, source in (
            (
                "e2e_request_latency",
                "from the start of a call to the end of each successful text",
                metrics.request_duration,
            ),
            ("request_queue_time", "from acceptance to the first step", metrics.request_queue_duration),
            (
                "request_inference_time",
                "from the first step to the end of each successful text",
                metrics.request_inference_duration,
            ),
        ):
            self._view(f"{name}_seconds", f"Seconds {help}", source, PER_REQUEST_S)
        self.request_prefill_time = self._observed(
            "request_prefill_time_seconds",
            "Seconds from the first step to the first token of each successful text",
            PER_REQUEST_S,
        )
        self.request_decode_time = self._observed(
            "request_decode_time_seconds",
            "Seconds from the first token to the end of each successful text",
            PER_REQUEST_S,
        )

    def _gauge(self, name: str, help: str, source: Gauge) -> None:
        self._add(GaugeView(f"vllm:{name}", help, source, self._labels))

    def _info(self, name: str, help: str, label_names: Labels) -> LabelledGauge:
        gauge = LabelledGauge(f"vllm:{name}", help, label_names)
        self._add(gauge)
        return gauge

    def _count(self, name: str, help: str, read: Callable[[], float]) -> None:
        labels = self._labels
        self._add(CounterView(f"vllm:{name}", help, MODEL_LABELS, lambda: {labels: read()}))

    def _view(self, name: str, help: str, source: Histogram, bounds: Sequence[float]) -> None:
        self._add(HistogramView(f"vllm:{name}", help, source, bounds, self._labels))

    def _observed(self, name: str, help: str, bounds: Sequence[float]) -> Histogram:
        source = Histogram(name, help, bounds, (), self._storage)
        self._view(name, help, source, bounds)
        return source

    def _add(self, series: Series) -> None:
        self.series.append(series)


class VllmCall:
    """Observer of one call's texts as they end."""

    def __init__(self, series: VllmSeries, num_texts: int) -> None:
        self._series = series
        self._num_texts = num_texts
        self._lengths: defaultdict[int, list[int]] = defaultdict(list)
        """Numbers of generated tokens in ended texts, by input."""

    def finish(self, index: int, num_input_tokens: int, num_generated: int, timings: Timings) -> None:
        """Observe the text at `index`, counted from 0. The texts of an input are adjacent."""
        series = self._series
        first_s = timings.first_token_s
        series.request_prompt_tokens.observe(num_input_tokens)
        if first_s is not None:
            decode_s = timings.total_s - first_s
            series.request_prefill_time.observe(first_s - timings.queue_s)
            series.request_decode_time.observe(decode_s)
            if num_generated > 1:
                series.request_time_per_output_token.observe(decode_s / (num_generated - 1))
        lengths = self._lengths[index // self._num_texts]
        lengths.append(num_generated)
        if len(lengths) == self._num_texts:
            series.request_params_n.observe(self._num_texts)
            series.request_max_num_generation_tokens.observe(max(lengths))


def _total(counter: Counter) -> Callable[[], float]:
    return lambda: counter.values()[()]


def _finished(success: Counter, failure: Counter) -> Mapping[str, float]:
    """Return the number of finished requests by vLLM's finish reason."""
    numbers = Tally[str](dict.fromkeys((*FINISHED.values(), *FAILED.values()), 0))
    for (reason, _), number in success.values().items():
        numbers[FINISHED[StopReason[reason]]] += int(number)
    for (kind,), number in failure.values().items():
        if kind in FAILED:
            numbers[FAILED[kind]] += int(number)
    return numbers


def _one_two_five(end: int) -> list[float]:
    """Return 1, 2, 5, 10, 20, 50 and so on, up to `end`."""
    return [n * 10**k for k in range(len(str(end))) for n in (1, 2, 5) if n * 10**k <= end]
