"""The Prometheus series of the service. Counters are exported under TGIS's bare name and with `_total`."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, Metric, UntypedMetricFamily

disable_created_metrics()  # type: ignore[no-untyped-call]

DURATION_BUCKETS = tuple(0.0001 * 1.5**k for k in range(1, 36))


class TwiceNamedCounter:
    """A counter that a scrape shows as `name` and as `name_total`."""

    def __init__(self, name: str, help: str, labels: tuple[str, ...], registry: CollectorRegistry) -> None:
        self._name, self._help, self._labels = name, help, labels
        self._values: dict[tuple[str, ...], float] = {}
        registry.register(self)

    def add(self, *labels: str, amount: float = 1) -> None:
        """Label values in the order of declaration."""
        assert len(labels) == len(self._labels), f"{self._name} has labels {self._labels}"
        self._values[labels] = self._values.get(labels, 0.0) + amount

    def value(self, *labels: str) -> float:
        return self._values.get(labels, 0.0)

    def collect(self) -> Iterable[Metric]:
        bare = UntypedMetricFamily(self._name, self._help, labels=self._labels)
        total = CounterMetricFamily(self._name, self._help, labels=self._labels)
        for labels, value in self._values.items():
            bare.add_metric(labels, value)
            total.add_metric(labels, value)
        return [bare, total]


class Metrics:
    """One registry per router, so that two routers in one process do not meet."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, help: str, *labels: str) -> TwiceNamedCounter:
            return TwiceNamedCounter(name, help, labels, self.registry)

        def gauge(name: str, help: str) -> Gauge:
            return Gauge(name, help, registry=self.registry)

        def duration(name: str, help: str) -> Histogram:
            return Histogram(name, help, buckets=DURATION_BUCKETS, registry=self.registry)

        self.request_count = counter("tgi_request_count", "Generation calls", "kind")
        self.request_input_count = counter("tgi_request_input_count", "Inputs of generation calls")
        self.request_success = counter("tgi_request_success", "Finished inputs", "stop_reason", "kind")
        self.request_failure = counter("tgi_request_failure", "Failed calls and cancelled inputs", "err")
        self.request_duration = duration("tgi_request_duration", "Seconds from call to end, per input")
        self.first_token_duration = duration(
            "tgi_request_time_to_first_token_duration", "Seconds from acceptance to the first token"
        )
        self.inter_token_duration = duration(
            "tgi_request_inter_token_duration", "Seconds between tokens of an input"
        )
        self.forward_duration = duration(
            "tgi_batch_inference_forward_duration", "Seconds of a step's forward pass"
        )
        self.requests_live = gauge("tgi_requests_live", "Accepted sequences without a final event")
        self.permits_used = gauge("tgi_permits_used", "Permits for inputs that are held")
        self.tasks = gauge("tgi_tasks", "Tasks of the router's event loop")
        self.queue_size = gauge("tgi_queue_size", "Sequences that wait for a place in the batch")
        self.batch_current_size = gauge("tgi_batch_current_size", "Sequences in the batch")
        self.requests_running = gauge("tgi_requests_running", "Sequences in the batch")
        self.kv_cache_usage = gauge("tgi_kv_cache_usage_ratio", "Share of the cache's blocks in use")
        self.preemptions = counter("tgi_preemptions", "Sequences put back into the queue for lack of memory")
        self.shard_restarts = counter("tgi_shard_restarts", "Times the shards were lost")

    def render(self) -> bytes:
        """The text format of a scrape."""
        return generate_latest(self.registry)
