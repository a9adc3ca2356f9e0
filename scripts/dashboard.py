"""Generates `deployment/monitoring/dashboard.json`, row by row, for all replicas of a service."""

from collections.abc import Sequence

from scripts.grafana import Panel, Query, Row, Variable
from scripts.grafana import render as render_grafana

CHOSEN = ("namespace", "pod", "instance")  # labels set by the scrape configuration
SELECTOR = ", ".join(f'{name}=~"${name}"' for name in CHOSEN)
EACH = "{{pod}} {{instance}}"
QUANTILES = (0.5, 0.95, 0.99)


def series(name: str, matchers: str = "") -> str:
    return f"{name}{{{SELECTOR}{', ' * bool(matchers)}{matchers}}}"


def rate(name: str, matchers: str = "") -> str:
    return f"rate({series(name, matchers)}[$__rate_interval])"


def total(name: str, *labels: str) -> str:
    """Return a query for the rate per second, summed over replicas, by `labels`."""
    return f"sum{_by(labels)} ({rate(name)})"


def each(name: str) -> str:
    """Return a query for a gauge of each replica."""
    return f"sum by (pod, instance) ({series(name)})"


def quantiles(name: str, what: str = "", matchers: str = "") -> list[Query]:
    buckets = f"sum by (le) ({rate(name + '_bucket', matchers)})"
    return [Query(f"histogram_quantile({q}, {buckets})", f"{what}p{q * 100:g}") for q in QUANTILES]


def mean(name: str, *labels: str) -> str:
    return f"{total(name + '_sum', *labels)} / {total(name + '_count', *labels)}"


def _by(labels: Sequence[str]) -> str:
    return f" by ({', '.join(labels)})" if labels else ""


def _uses(kind: str) -> list[Query]:
    names = ("cache_hits", "cache_misses", "cache_evictions", "load_failure")
    return [Query(total(f"tgi_{kind}_{name}_total"), name.replace("_", " ")) for name in names]


def _loaded(kind: str) -> list[Query]:
    return [Query(each(f"tgi_{kind}_cache_bytes"), f"{kind}s {EACH}")]


FIRST_TOKEN = "tgi_request_time_to_first_token_duration"  # noqa: S105
INTER_TOKEN = "tgi_request_inter_token_duration"  # noqa: S105
STEP = "tgi_batch_inference_duration"
FORWARD = "tgi_batch_inference_forward_duration"
GENERATED = f"{rate(FIRST_TOKEN + '_count')} + {rate(INTER_TOKEN + '_count')}"
TOKENS_HELP = "All generated tokens, including those of running inputs."

ROWS = (
    Row(
        "Traffic",
        [
            Panel("Calls started", "reqps", [Query(total("tgi_request_count_total", "kind"), "{{kind}}")]),
            Panel(
                "Completed inputs by stop reason",
                "reqps",
                [Query(total("tgi_request_success_total", "stop_reason"), "{{stop_reason}}")],
                is_stacked=True,
            ),
            Panel(
                "Failures by cause",
                "reqps",
                [Query(total("tgi_request_failure_total", "err"), "{{err}}")],
                "validation, unauthenticated, tenant_limit and cancelled are caused by clients; generate, "
                "timeout and token_timeout by the service; conc_limit and queue_timeout: the service is "
                "overloaded.",
                is_stacked=True,
            ),
            Panel(
                "Calls with parameters outside the messages",
                "reqps",
                [Query(total("tgi_request_parameter_count_total", "parameter"), "{{parameter}}")],
                "Set by metadata, or over HTTP; a call counts under each parameter that it sets.",
            ),
        ],
    ),
    Row(
        "HTTP APIs",
        [
            Panel(
                "Responses by status",
                "reqps",
                [Query(total("tgi_http_api_request_count_total", "api", "code"), "{{api}} {{code}}")],
                "APIs of --http-api; 4xx are caused by clients, 5xx by the service; 429: the service is "
                "overloaded. Empty without an API.",
                is_stacked=True,
            ),
            Panel(
                "Responses by route",
                "reqps",
                [Query(total("tgi_http_api_request_count_total", "api", "route"), "{{api}} {{route}}")],
                is_stacked=True,
            ),
            Panel(
                "Connections and streams",
                "short",
                [
                    Query(f"sum ({series('tgi_http_api_connections')})", "connections"),
                    Query(f"sum ({series('tgi_http_api_active_streams')})", "streams"),
                ],
            ),
            Panel("Time to render a chat", "s", quantiles("tgi_chat_template_duration")),
            Panel(
                "Failed chat templates",
                "reqps",
                [Query(total("tgi_chat_template_failure_total", "err"), "{{err}}")],
                "template: the template refused the chat or is invalid; killed: it needed too much time or "
                "memory.",
            ),
        ],
    ),
    Row(
        "Latencies",
        [
            Panel("Time to the first token", "s", quantiles(FIRST_TOKEN)),
            Panel("Time between two tokens", "s", quantiles(INTER_TOKEN)),
            Panel("Time in the queue", "s", quantiles("tgi_request_queue_duration")),
            Panel("Time of whole inputs", "s", quantiles("tgi_request_duration")),
        ],
    ),
    Row(
        "Load",
        [
            Panel(
                "Ready",
                "short",
                [Query(each("tgi_ready"), EACH)],
                "0: loading, without shards, or shutting down.",
            ),
            Panel("Inputs in the queue", "short", [Query(each("tgi_queue_size"), EACH)]),
            Panel("Inputs in the batch", "short", [Query(each("tgi_requests_running"), EACH)]),
            Panel(
                "Permits",
                "short",
                [
                    Query(f"sum ({series('tgi_permits_used')})", "used"),
                    Query(f"sum ({series('tgi_permits_limit')})", "limit"),
                    Query(f"sum ({series('tgi_requests_live')})", "live inputs"),
                ],
                "If used reaches the limit, calls are refused with conc_limit.",
            ),
        ],
    ),
    Row(
        "Tokens",
        [
            Panel(
                "Generated tokens per second",
                "short",
                [
                    Query(f"sum ({GENERATED})", "all"),
                    Query(f"sum by (pod, instance) ({GENERATED})", EACH),
                ],
                TOKENS_HELP,
            ),
            Panel(
                "Prompt tokens per second",
                "short",
                [
                    Query(total("tgi_batch_next_tokens_sum"), "computed"),
                    Query(total("tgi_prefix_cache_hits_total"), "read from the cache"),
                ],
                is_stacked=True,
            ),
            Panel("Tokens of an input", "short", quantiles("tgi_request_input_length")),
            Panel("Tokens of an output", "short", quantiles("tgi_request_generated_tokens")),
        ],
    ),
    Row(
        "Cache",
        [
            Panel("Cache in use", "percentunit", [Query(each("tgi_kv_cache_usage_ratio"), EACH)]),
            Panel(
                "Prompt tokens read from the prefix cache",
                "percentunit",
                [
                    Query(
                        f"{total('tgi_prefix_cache_hits_total')} / {total('tgi_prefix_cache_queries_total')}",
                        "hits",
                    )
                ],
            ),
            Panel("Cached tokens of an input", "short", quantiles("tgi_request_cached_tokens")),
            Panel(
                "Lack of cache",
                "ops",
                [
                    Query(total("tgi_preemptions_total"), "preempted inputs"),
                    Query(total("tgi_prefill_weight_limit_exceeded_total"), "first input did not fit"),
                ],
            ),
        ],
    ),
    Row(
        "Batches",
        [
            Panel(
                "Steps per second",
                "ops",
                [Query(total("tgi_batch_inference_success_total", "method"), "{{method}}")],
                "A step with prompt and decode tokens counts under both.",
            ),
            Panel(
                "Sequences per step",
                "short",
                [Query(mean("tgi_batch_inference_batch_size", "method"), "{{method}}")],
            ),
            Panel(
                "Time of a step, median and p95",
                "s",
                [
                    query
                    for method in ("prefill", "next_token")
                    for query in quantiles(STEP, f"{method} ", f'method="{method}"')[:2]
                ],
            ),
            Panel(
                "Parts of a step's time",
                "s",
                [
                    Query(mean(STEP, "method"), "whole {{method}}"),
                    Query(mean(FORWARD, "method"), "shards {{method}}"),
                    Query(mean("tgi_batch_inference_tokproc_duration", "method"), "router {{method}}"),
                ],
            ),
        ],
    ),
    Row(
        "Shards",
        [
            Panel(
                "Losses of the shards",
                "short",
                [Query(f"sum by (pod, instance) ({series('tgi_shard_restarts_total')})", EACH)],
                "Since the start of the router.",
            ),
            Panel(
                "Steps lost with the shards",
                "short",
                [Query(f"sum by (method) ({series('tgi_batch_inference_failure_total')})", "{{method}}")],
                "Since the start of the router.",
            ),
            Panel(
                "Steps of GPUs per second, by path",
                "ops",
                [Query(total("tgi_steps_by_path_total", "path"), "{{path}}")],
                "Paths other than graph name the reason. Empty on CPUs.",
                is_stacked=True,
            ),
            Panel(
                "Replaced kernels",
                "short",
                [Query(f"sum by (kernel) ({series('tgi_replaced_kernels')})", "{{kernel}}")],
                "Replicas on which a kernel failed the check at start-up. Empty if all passed.",
            ),
            Panel(
                "Accepted draft tokens",
                "percentunit",
                [
                    Query(
                        f"{total('tgi_speculation_accepted_tokens_total')}"
                        f" / {total('tgi_speculation_drafted_tokens_total')}",
                        "accepted",
                    )
                ],
                "With --speculate or --speculator.",
            ),
            Panel(
                "Accepted draft tokens, by position",
                "percentunit",
                [
                    Query(
                        f"{total('tgi_speculation_accepted_tokens_by_position_total', 'position')}"
                        f" / scalar({total('tgi_speculation_drafts_total')})",
                        "{{position}}",
                    )
                ],
                "Share of the steps with drafts in which the draft at this position after the last token, "
                "from 0, was accepted.",
            ),
        ],
    ),
    Row(
        "Processes",
        [
            Panel(
                "Router workers", "short", [Query(each("tgi_router_workers"), EACH)], "Responding workers."
            ),
            Panel(
                "Restarted processes",
                "short",
                [
                    Query(
                        f"sum by (pod, instance, process) ({series('tgi_process_restarts_total')})",
                        "{{process}} " + EACH,
                    )
                ],
                "Since the start of the service: router workers (router) and the engine process (engine).",
            ),
        ],
    ),
    Row(
        "Resources",
        [
            Panel(
                "Resources not released",
                "short",
                [
                    Query(
                        f"sum by (kind) ({series('tgi_resources_created_total')}"
                        f" - {series('tgi_resources_released_total')})",
                        "{{kind}}",
                    )
                ],
                "All are 0 when the service is idle; other values are leaks.",
            ),
            Panel("Tasks of the router", "short", [Query(each("tgi_tasks"), EACH)]),
            Panel("Open descriptors of the router", "short", [Query(each("tgi_open_descriptors"), EACH)]),
            Panel(
                "Certificate expires in",
                "s",
                [Query(f"{each('tgi_tls_certificate_seconds_left')} != 0", EACH)],
                "Certificate of the public port; empty without TLS.",
            ),
        ],
    ),
    Row(
        "Prompts and adapters",
        [
            Panel("Uses of soft prompts", "ops", _uses("prompt")),
            Panel("Uses of adapters", "ops", _uses("adapter")),
            Panel(
                "Time of a load, p95",
                "s",
                [
                    quantiles("tgi_prompt_load_duration", "prompts ")[1],
                    quantiles("tgi_adapter_load_duration", "adapters ")[1],
                ],
            ),
            Panel("Bytes loaded", "decbytes", [*_loaded("prompt"), *_loaded("adapter")]),
        ],
    ),
)


def render() -> str:
    variables = [Variable(name, "tgi_ready") for name in CHOSEN]
    return render_grafana("TGIS-next", "tgis-next", variables, ROWS)
