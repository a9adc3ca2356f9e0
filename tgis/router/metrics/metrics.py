"""Declares every metric series of the service once, for the scrape and for `docs/metrics.md`."""

from collections.abc import Iterable
from dataclasses import dataclass

from tgis.router.metrics.aliased_series import AliasedSeries, MakeAliases
from tgis.router.metrics.gauges import Gauge, GaugeValues, LabelledGauge
from tgis.router.metrics.metric_types import Counter, Histogram
from tgis.router.metrics.resource_counts import ResourceCount
from tgis.router.metrics.series_registry import SeriesRegistry
from tgis.router.metrics.storage import Storage

TOKENIZE_BOUNDS = tuple(64 * 2**k for k in range(14))
NUM_LENGTH_BUCKETS = 64
ROUTER = "router"  # kinds of processes
ENGINE = "engine"
MAKEUP = "single_only"  # the only value that TGIS's label `makeup` ever has


@dataclass(frozen=True)
class MetricLimits:
    """Upper bounds of the buckets for lengths and sizes."""

    max_sequence_length: int
    max_new_tokens: int
    max_batch_size: int


@dataclass(frozen=True)
class AdapterMetrics:
    load_duration: Histogram
    load_failure: Counter
    entries: Gauge
    bytes: Gauge
    hits: Counter
    misses: Counter
    evictions: Counter


class Metrics(SeriesRegistry):
    """All series of one router process, or of all router processes. Only one thread updates them."""

    def __init__(
        self, limits: MetricLimits, make_aliases: MakeAliases | None = None, storage: Storage | None = None
    ) -> None:
        """Declare them, and those that `make_aliases` returns."""
        super().__init__(storage)
        self._limits = limits
        self._make_aliases = make_aliases
        self.resource_counts: dict[str, ResourceCount] = {}
        self._declare_requests()
        self._declare_lengths(limits)
        self._declare_durations()
        self._declare_batches(limits)
        self._declare_steps()
        self._declare_tokenize()
        self._declare_http_apis()
        self._declare_state()
        self._declare_processes()
        self._declare_cache()
        self._declare_tls()
        self._declare_shards()
        self.prompts = self._declare_adapters("tgi_prompt", "soft prompts")
        self.adapters = self._declare_adapters("tgi_adapter", "adapters")
        self.aliases: AliasedSeries | None = None
        if make_aliases is not None:
            self.aliases = make_aliases(self, self.storage)
            for one in self.aliases.series:
                self._add(one)

    def _declare_requests(self) -> None:
        self.request_count = self._counter(
            "tgi_request_count", "Generation calls, at their start; kind is single, batch or stream", "kind"
        )
        self.request_input_count = self._counter(
            "tgi_request_input_count", "Inputs of generation calls, at their start"
        )
        self.request_parameter_count = self._counter(
            "tgi_request_parameter_count",
            "Accepted calls by each parameter that they set and fmaas's messages lack, such as min_p or n; "
            "input_ids counts calls whose inputs are token ids",
            "parameter",
        )
        self.request_success = self._counter(
            "tgi_request_success", "Inputs that ended with a stop reason", "stop_reason", "kind"
        )
        self.request_failure = self._counter(
            "tgi_request_failure",
            "Rejected or failed calls (conc_limit, validation, generate, unauthenticated), streams whose "
            "client does not read (slow_reader), calls without a first step in time (queue_timeout) or "
            "without a token in time (token_timeout), calls above a limit of their tenant (tenant_limit), "
            "cancelled inputs, and inputs whose time limit passed before their first step (timeout; these "
            "also count as successes)",
            "err",
        )

    def _declare_lengths(self, limits: MetricLimits) -> None:
        lengths = _equal_steps(limits.max_sequence_length)
        outputs = _equal_steps(limits.max_new_tokens)
        self.request_raw_input_length = self._summary(
            "tgi_request_raw_input_length",
            "Tokens of each tokenized input before truncation, including rejected inputs",
        )
        self.request_input_length = self._histogram(
            "tgi_request_input_length", "Tokens of each accepted input, after truncation", lengths
        )
        self.request_cached_tokens = self._histogram(
            "tgi_request_cached_tokens",
            "Tokens of each successful input that were in the prefix cache at its start",
            lengths,
        )
        self.request_max_new_tokens = self._histogram(
            "tgi_request_max_new_tokens", "max_new_tokens of each accepted input, as requested", outputs
        )
        self.request_generated_tokens = self._histogram(
            "tgi_request_generated_tokens", "Generated tokens of each successful input", outputs
        )
        self.request_total_tokens = self._histogram(
            "tgi_request_total_tokens", "Input and generated tokens of each successful input", lengths
        )

    def _declare_durations(self) -> None:
        self.request_duration = self._duration(
            "tgi_request_duration", "Seconds from the start of a call to the end of each successful input"
        )
        self.request_validation_duration = self._duration(
            "tgi_request_validation_duration", "Seconds from the start of a call until it is validated"
        )
        self.request_queue_duration = self._duration(
            "tgi_request_queue_duration", "Seconds from acceptance of an input to its first step"
        )
        self.request_inference_duration = self._duration(
            "tgi_request_inference_duration", "Seconds from the first step of an input to its end"
        )
        self.request_mean_time_per_token_duration = self._duration(
            "tgi_request_mean_time_per_token_duration", "Seconds of inference per generated token, per input"
        )
        self.first_token_duration = self._duration(
            "tgi_request_time_to_first_token_duration", "Seconds from acceptance to the first token"
        )
        self.inter_token_duration = self._duration(
            "tgi_request_inter_token_duration", "Seconds between two tokens of an input"
        )

    def _declare_batches(self, limits: MetricLimits) -> None:
        sizes = range(1, limits.max_batch_size + 1)
        self.batch_count = self._counter(
            "tgi_batch_inference_count",
            "Steps sent to the shards; a step with prompt and decode tokens counts under both methods",
            "method",
        )
        self.batch_success = self._counter(
            "tgi_batch_inference_success", "Answered steps, counted like sent steps", "method"
        )
        self.batch_failure = self._counter(
            "tgi_batch_inference_failure",
            "Steps lost with the shards (connection), counted like sent steps",
            "method",
            "reason",
        )
        self.batch_size = self._histogram(
            "tgi_batch_inference_batch_size",
            "Prompt sequences of a step (prefill) and decode rows of a step (next_token)",
            sizes,
            "method",
        )
        self.batch_next_tokens = self._summary(
            "tgi_batch_next_tokens",
            "Prompt tokens computed by each step with prompt tokens, including virtual tokens",
        )
        self.batch_concatenation_count = self._counter(
            "tgi_batch_concatenation_count", "Steps in which new inputs joined a running batch"
        )
        self.deferred = self._counter(
            "tgi_prefill_weight_limit_exceeded",
            "Times that there were too few free cache blocks for the first waiting input",
        )
        for name, help in (
            ("tgi_queue_jump", "Stays 0: no input overtakes one of its tenant and priority"),
            ("tgi_granular_batch_addition", "Stays 0: memory is counted in blocks, not estimated"),
            ("tgi_prefill_padding_limit_exceeded", "Stays 0: nothing is padded"),
        ):
            self._counter(name, help)

    def _declare_steps(self) -> None:
        method_labels = ("method", "makeup")
        self.batch_duration = self._duration(
            "tgi_batch_inference_duration",
            "Seconds from a step to its answer, or from the previous answer if the step was sent ahead; "
            "mixed steps count under prefill",
            *method_labels,
        )
        self.forward_duration = self._duration(
            "tgi_batch_inference_forward_duration",
            "Seconds that the shards computed a step; mixed steps count under prefill",
            *method_labels,
        )
        self.tokproc_duration = self._duration(
            "tgi_batch_inference_tokproc_duration",
            "Seconds that the router took to apply a step's answer; mixed steps count under prefill",
            *method_labels,
        )

        self.steps_by_path = self._counter(
            "tgi_steps_by_path",
            "Steps that GPUs computed: as CUDA graphs (graph); kernel by kernel, because of a prompt, the "
            "batch size, the model, an adapter or drafts; or with sampling on the host, because of many top "
            "tokens (details) or long lists (of stop token ids or biases)",
            "path",
        )

    def _declare_tokenize(self) -> None:
        self.tokenize_count = self._counter("tgi_tokenize_request_count", "Tokenize calls, at their start")
        self.tokenize_input_count = self._counter(
            "tgi_tokenize_request_input_count", "Inputs of Tokenize calls, at their start"
        )
        self.tokenize_tokens = self._histogram(
            "tgi_tokenize_request_tokens", "Sum of the token counts of a Tokenize answer", TOKENIZE_BOUNDS
        )
        self.tokenize_duration = self._duration(
            "tgi_tokenize_request_duration", "Seconds of a successful Tokenize call"
        )

    def _declare_http_apis(self) -> None:
        self.http_api_requests = self._counter(
            "tgi_http_api_request_count",
            "Responses of the HTTP APIs (--http-api) by status, at their start; route is other for an "
            "unknown path",
            "api",
            "route",
            "code",
        )
        self.http_api_connections = self._gauge(
            "tgi_http_api_connections",
            "Connections with an active request to an HTTP API",
        )
        self.http_api_streams = self._gauge(
            "tgi_http_api_active_streams",
            "Active streams of the HTTP APIs",
        )
        self.chat_template_duration = self._duration(
            "tgi_chat_template_duration", "Seconds to render a chat with its template, including the queue"
        )
        self.chat_template_failure = self._counter(
            "tgi_chat_template_failure",
            "Chats that were not rendered: the template rejected them or has an error (template), or it "
            "exceeded its time or memory (killed)",
            "err",
        )

    def _declare_state(self) -> None:
        self.queue_size = self._gauge("tgi_queue_size", "Inputs that wait for a place in the batch")
        self.queue_uncached_tokens = self._gauge(
            "tgi_queue_uncached_tokens",
            "Tokens of the waiting inputs that are not cached, estimated from tgi_prefix_cache_hit_ratio",
        )
        self.generation_throughput = self._gauge(
            "tgi_generation_throughput", "Tokens generated per second, over the last ten seconds"
        )
        self.queue_tenants = self._gauge("tgi_queue_tenants", "Tenants with inputs in the queue")
        self.batch_current_size = self._gauge("tgi_batch_current_size", "Inputs in the batch")
        self.batch_input_tokens = self._gauge(
            "tgi_batch_input_tokens", "Input and generated tokens of the inputs in the batch"
        )
        self.batch_max_remaining_tokens = self._gauge(
            "tgi_batch_max_remaining_tokens",
            "Total tokens that the inputs in the batch may still generate",
        )
        self.requests_running = self._gauge("tgi_requests_running", "Inputs in the batch")
        self.requests_live = self._gauge("tgi_requests_live", "Accepted inputs without a final event")
        self.permits_used = self._gauge("tgi_permits_used", "Used part of the concurrency limit")
        self.permits_limit = self._gauge("tgi_permits_limit", "Concurrency limit")
        self.ready = self._gauge(
            "tgi_ready", "1 while calls are served; 0: loading, shards lost, or shutting down", min
        )

    def _declare_processes(self) -> None:
        self.router_workers = self._gauge(
            "tgi_router_workers", "Router processes that serve the public ports"
        )
        self.process_restarts = self._counter(
            "tgi_process_restarts",
            "Restarts of router processes; process is router (a router worker) or engine",
            "process",
        )
        self.tasks = self._gauge("tgi_tasks", "Tasks of the router's event loop")
        self.descriptors = self._gauge("tgi_open_descriptors", "Open file descriptors of the router")
        self.created = self._counter(
            "tgi_resources_created",
            "Resources taken so far: accepted inputs (request), cache blocks, rows of the shards' tables, "
            "concurrency permits, uses of soft prompts and adapters (content)",
            "kind",
        )
        self.released = self._counter(
            "tgi_resources_released",
            "Resources released so far, equal to those taken when the service is idle. A killed process's "
            "resources are released when it is replaced",
            "kind",
        )

    def _declare_cache(self) -> None:
        self.kv_cache_usage = self._gauge("tgi_kv_cache_usage_ratio", "Fraction of the cache's blocks in use")
        self.prefix_cache_queries = self._counter(
            "tgi_prefix_cache_queries", "Tokens looked up in the prefix cache"
        )
        self.prefix_cache_hits = self._counter(
            "tgi_prefix_cache_hits", "Tokens found in the prefix cache, which need no computation"
        )
        self.prefix_cache_hit_rate = self._gauge(
            "tgi_prefix_cache_hit_ratio",
            "Fraction of all tokens looked up in the prefix cache that were found",
        )
        self.state_usage = self._gauge(
            "tgi_state_usage_ratio",
            "Fraction of the slots for states that sequences use; 0 if the model keeps no state",
        )
        self.state_snapshots = self._gauge(
            "tgi_state_snapshots", "Snapshots of states, from which inputs with the same prefix continue"
        )
        self.preemptions = self._counter(
            "tgi_preemptions", "Inputs put back into the queue for lack of cache blocks"
        )
        self.drafts = self._total("tgi_speculation_drafted_tokens", "Computed draft tokens")
        self.accepted_drafts = self._total("tgi_speculation_accepted_tokens", "Accepted draft tokens")
        self.drafted_rows = self._total(
            "tgi_speculation_drafts", "Sequences of draft tokens, at most one per input and step"
        )
        self.accepted_by_position = self._total(
            "tgi_speculation_accepted_tokens_by_position",
            "Accepted draft tokens by their position after the last token, from 0",
            "position",
        )

        self.speculator_active = self._gauge(
            "tgi_speculator_active",
            "1 while new inputs get drafts of the speculator; 0: there is none, or its drafts do not pay",
        )

    def _declare_tls(self) -> None:
        self.tls_seconds_left = self._gauge(
            "tgi_tls_certificate_seconds_left",
            "Seconds until the public port's certificate expires; 0: no certificate",
            min,
        )
        self.tls_refusals = self._counter(
            "tgi_tls_reload_failure",
            "Changed TLS files that were rejected as invalid",
        )

    def _declare_shards(self) -> None:
        self.shard_restarts = self._counter("tgi_shard_restarts", "Times the shards were lost")
        self.replaced_kernels = self._add(
            LabelledGauge(
                "tgi_replaced_kernels",
                "1 for each kernel that failed the check at start and is replaced by slower operators; no "
                "series if all passed",
                ("kernel",),
                max,
            )
        )

    def _declare_adapters(self, name: str, what: str) -> AdapterMetrics:
        return AdapterMetrics(
            load_duration=self._duration(
                f"{name}_load_duration", f"Seconds from look-up to use of {what} that had to be loaded"
            ),
            load_failure=self._counter(
                f"{name}_load_failure", f"Calls whose look-up or load of {what} failed"
            ),
            entries=self._gauge(f"{name}_cache_entries", f"Loaded {what}"),
            bytes=self._gauge(f"{name}_cache_bytes", f"Maximum bytes of loaded {what} per shard"),
            hits=self._counter(f"{name}_cache_hits", f"Uses of {what} that were already loaded"),
            misses=self._counter(f"{name}_cache_misses", f"Uses of {what} that had to be loaded"),
            evictions=self._counter(
                f"{name}_cache_evictions", f"Unloads of {what} to free memory for others"
            ),
        )

    def follow_resource(self, kind: str, count: ResourceCount) -> None:
        """Expose a count in every scrape, and check it at shutdown."""
        self.resource_counts[kind] = count
        self.created.follow(lambda: count.created, kind)
        self.released.follow(lambda: count.released, kind)

    def begin_process(self, process: str) -> None:
        """Count the start of this process. Count the resources of the slot's earlier process as released,
        because it has ended."""
        self.process_restarts.add(process, amount=self.storage.is_reopened)
        if process == ROUTER:
            self.router_workers.follow(lambda: 1.0)
        for labels, created in self.created.values().items():
            released = self.released.values().get(labels, 0.0)
            self.released.add(*labels, amount=max(created - released, 0.0))

    def across(self, storage: Storage, processes: Iterable[GaugeValues]) -> "Metrics":
        """Return the same series with the numbers of a storage and the gauges of several processes."""
        metrics = Metrics(self._limits, self._make_aliases, storage)
        metrics.show_gauges(processes)
        return metrics


def _equal_steps(end: int) -> list[float]:
    return [end * i / NUM_LENGTH_BUCKETS for i in range(1, NUM_LENGTH_BUCKETS + 1)]
