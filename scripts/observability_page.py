"""Generates `docs/observability.md`; the alerts come from their rules."""

import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

CURES = Path(__file__).parent / "alerts.toml"
RULES = Path(__file__).resolve().parent.parent / "deployment" / "monitoring" / "rules.yaml"

INTRODUCTION = """\
# Observability

This page describes what a running service reports: metrics, logs, traces, a terminal view, a dashboard and alerts. None
of them contains the text of a request.

| | where | what |
|---|---|---|
| metrics | `GET /metrics` on the HTTP port, 3000 | [every series](metrics.md), under TGIS's names; with `--metrics-alias vllm`, also under [vLLM's](metrics.md#under-vllms-names) |
| health | `/health`, `/live`, gRPC's health service | whether the service is ready, whether it is alive ([reliability](reliability.md)) |
| logs | stderr; [`--json-output`](#logs) for machines | one line per input, with its ids, counts, times and result |
| traces | `--otlp-endpoint` | one span per call |
| load | with each call, or gRPC's `OpenRcaService` | how busy the service is, [for load balancers](#load-for-balancers) |
| terminal | `tgis top` | the metrics of one instance, updated every second |
| dashboard | `deployment/monitoring/dashboard.json` | for Grafana; import it and choose a Prometheus |
| rules | `deployment/monitoring/rules.yaml` | recorded series and alerts, for Prometheus |

## Logs

With `--json-output` every line of the launcher and its child processes is one JSON object:

```json
{"timestamp": "2026-01-31T12:00:00.123Z", "level": "INFO", "logger": "tgis.shard.server",
 "message": "rank 0 of 2 serves /model on /tmp/text-generation-x/shard-0", "process": "shard", "rank": 0}
```

- `process` is `launcher`, `router`, `shard` or, while a tokenizer is converted, `tokenizer`. With several [router
  workers](router-workers.md), it can also be `engine`, and a worker's lines have its number in `worker`. A shard's
  lines have its `rank`. With several nodes, all lines have the `node`.
- A line that a library prints becomes the `message` of an object whose `logger` is `output`, so one crash may produce
  several objects. The level is read from the line; it is WARNING if the line has none. A line that is already a JSON
  object keeps its fields and gets the missing ones. Bytes that are not UTF-8 are replaced, and lines longer than 1 MiB
  are split into several objects.
- The line of an input has the fields `request_id`, `correlation_id`, `input_bytes`, `params`, `input_tokens`,
  `output_tokens`, `stop_reason` and times in milliseconds (`queue_time_ms`, `total_time_ms` and others). It also has
  `cached_tokens`, the number of input tokens found in the prefix cache, if the input finished; `tenant`, if a
  certificate or a token names the caller; and `prefix_id`, `adapter_id` and `seed`, if they are set. `params` contains
  the number of biases and stop token ids and the size of a cache salt, not their values.
- The line of a call over HTTP has `api` (`openai`, `tgi` or `lmi`), `method` (`Completion`, `ChatCompletion`,
  `Generate`, `Invocation` and so on) and `model`, the requested name. Its `correlation_id` is the request's id if the
  client sends no `x-correlation-id`. A client's mistake is a WARNING in the API's words; over `fmaas` it is an ERROR, as
  in TGIS. A request that is refused for its JSON or its token, before the service accepts it, is logged in one line,
  `POST /v1/completions is refused with 400: max_tokens must be an integer, not a string`, with `code` and the invalid
  `parameter`. Probes and scrapes are not logged.
- The reason in the line of a refusal is the text that the client receives, except where that text may quote the request:
  of errors in grammars and of refusals by chat templates, the log shows only the part before the quote.
- An uncaught Python exception is one object, with the stack trace in `traceback`.
- Lines that a client without a token can cause are limited to one of each kind per second; `tgi_request_failure` counts
  all events. A traceback from the same place is logged once a minute, with its last 20 frames. The next line has the
  number of omitted lines in `omitted`; if none follows in time, `lines like this one were omitted 5 times: …`
  reports it.
- If the start fails, the last line has level CRITICAL and the message `error: …`; the termination log has the reason as
  text.

## In a terminal

```shell
tgis top                                              # the service on this machine, until Ctrl-C
kubectl port-forward deploy/inference-server 3000 & tgis top --port 3000
tgis top --target https://localhost:3000 --ca-cert ca.pem --server-name inference-server
tgis top --once --interval 5                          # one frame of plain text; exit status 1 without a service
```

![tgis top](pictures/top.png)

Without `--target` and `--port` (or the variable `PORT`), it watches the service that this user has launched on this
machine, on any port. If there is none, it watches port 3000. It reads only `/metrics`. Rates, means and quantiles cover
the last `--window` seconds (10), between two scrapes. Quantiles are interpolated linearly within a bucket, as
Prometheus' `histogram_quantile` does; the upper bound of each bucket is 1.5 times that of the previous one. `generated`
counts tokens as they are generated, including those of unfinished inputs; `of prompts` counts computed tokens, without
those from the cache. `steps` shows the time of a step, the time that the shards take for it, and the router's work
after it. While the service does not answer, one line says so. A restart of the service begins a new window. When the
output is a pipe, the frames are plain text.

## Dashboard

![the dashboard's queries](pictures/dashboard.png)

`scripts/dashboard.py` generates the dashboard. Its variables are `namespace`, `pod` and `instance`, labels that the
scrape configuration adds. If a label is missing, the choice All shows everything. `make deploy-check` runs each of its
queries on a real Prometheus that scrapes a real service. `make screenshots` made the pictures of this page, without
Grafana.

## Traces

Traces need `--otlp-endpoint http://collector:4317` and `pip install '.[otel]'`. Spans are named
`fmaas.GenerationService/Generate`, or `POST /v1/chat/completions` over HTTP; HTTP spans have the attributes of HTTP
servers (`http.route`, `http.response.status_code`). Spans continue the caller's `traceparent`. They contain model,
tenant, parameters, token counts (`gen_ai.usage.cache_read.input_tokens` counts those from the prefix cache), finish
reasons, and the times in the queue, to the first token and of computation, but no text and no cache salt. With several
[router workers](router-workers.md) the resource attribute `service.instance.id` is `router-worker-N`. A slow or dead
collector does not delay calls. `deployment/monitoring/opentelemetry` has the configuration of a collector for traces
and metrics, and a kustomize component that sets the variables for sending traces to it.

## Load for balancers

Load balancers that know how busy each service is can spread calls by it. The service reports its load in the form of
[ORCA](https://github.com/cncf/xds/blob/main/xds/data/orca/v3/orca_load_report.proto), which gRPC's clients and Envoy
read:

| who asks | how | where the report is |
|---|---|---|
| a call over HTTP | header `endpoint-load-metrics-format: TEXT`, `JSON` or `BIN` | header `endpoint-load-metrics` |
| a call over gRPC | metadata `endpoint-load-metrics-format: BIN` | trailing metadata `endpoint-load-metrics-bin` |
| a call over gRPC | metadata `endpoint-load-metrics-format: TEXT` or `JSON` | trailing metadata `endpoint-load-metrics` |
| a client of gRPC's `xds.service.orca.v3.OpenRcaService` | `StreamCoreMetrics` with an interval of one second or more | messages of the stream |

```
endpoint-load-metrics: TEXT named_metrics.kv_cache_usage_perc=0.25, named_metrics.num_requests_running=3.0, …
```

Only successful calls get a report. Responses over HTTP report the load at their start, gRPC calls at their end. A
report describes the whole service, also with several router workers:

| field | meaning |
|---|---|
| `named_metrics.kv_cache_usage_perc` | fraction of the cache's blocks in use |
| `named_metrics.num_requests_running`, `named_metrics.num_requests_waiting` | inputs in the batch, and inputs that wait |
| `application_utilization` | the larger of the cache's usage and of all these inputs divided by `--max-batch-size`; above 1 if inputs wait for a place |
| `rps_fractional` | inputs per second that ended, over the last ten seconds |
| `eps` | requests per second that were refused for overload or after `--max-queue-time`, failed, or got no token in time |

gRPC's policy `weighted_round_robin` sends each service calls in proportion to its requests per second divided by its
utilization. Set it in the client's service config; it needs no proxy and no further metadata:

```json
{"loadBalancingConfig": [{"weighted_round_robin": {"enableOobLoadReport": true, "oobReportingPeriod": "1s"}}]}
```

The stream needs a token if the service has bearer tokens, and gRPC's policy sends none: use mutual TLS, or metadata
with each call.

## Recorded series

| series | meaning |
|---|---|
"""

RECORDED = {
    "tgis:calls:rate5m": "Calls per second",
    "tgis:failures:rate5m": "Failures per second, by `err`",
    "tgis:generated_tokens:rate5m": "Generated tokens per second",
    "tgis:time_to_first_token_seconds:p99_5m": "99th percentile of the time to the first token",
    "tgis:inter_token_seconds:p99_5m": "99th percentile of the time between two tokens",
    "tgis:queue_seconds:p95_5m": "95th percentile of the time in the queue",
    "tgis:prefix_hits:ratio5m": "Fraction of prompt tokens found in the prefix cache",
    "tgis:demand:ratio": "Live inputs divided by the concurrency limit, for autoscaling",
}

ALERTS = """
Each series is aggregated over the replicas of a service, by `namespace` and `job`.

## Alerts

`promtool test rules deployment/monitoring/rules_test.yaml` tests that each alert fires when it should and is silent
otherwise. Set the latency thresholds (`TgisSlowFirstToken`, `TgisSlowTokens`) to the objectives of your service.
"""


def render() -> str:
    rules = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    recorded = [f"| `{rule['record']}` | {RECORDED[rule['record']]} |" for rule in rules if "record" in rule]
    return INTRODUCTION + "\n".join([*recorded, ALERTS, *alerts(rules, tomllib.loads(CURES.read_text()))])


def alerts(rules: Iterable[dict[str, Any]], cures: dict[str, str]) -> list[str]:
    """Return the table of alerts. Raises an error for an alert without advice, and for advice without an
    alert."""
    by_name = {rule["alert"]: rule for rule in rules if "alert" in rule}
    if wrong := by_name.keys() ^ cures.keys():
        raise SystemExit(f"{CURES.name}, {RULES.name}: not an alert of both: {', '.join(sorted(wrong))}")
    return [_alert(rule, cures[name]) for name, rule in by_name.items()]


def _alert(rule: dict[str, Any], cure: str) -> str:
    lasting = f", for {rule['for']}" if "for" in rule else ""
    severity = rule["labels"]["severity"]
    lines = [
        f"### {rule['alert']}",
        "",
        f"{severity.capitalize()}{lasting}:",
        "",
        "```promql",
        rule["expr"],
        "```",
        "",
        cure,
        "",
    ]
    return "\n".join(lines)
