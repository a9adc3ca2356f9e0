"""`docs/observability.md`: what there is to see of a running service; the alerts follow from their rules."""

import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

CURES = Path(__file__).parent / "alerts.toml"
RULES = Path(__file__).resolve().parent.parent / "deployment" / "monitoring" / "rules.yaml"

INTRODUCTION = """\
# Observability

What a running service tells, and what is there to look at it with. Nothing of it shows a word of a request.

| | where | what |
|---|---|---|
| metrics | `GET /metrics` on the HTTP port, 3000 | [every series](metrics.md), under TGIS's names |
| health | `/health`, `/live`, gRPC's health service | ready to serve; alive ([reliability](reliability.md)) |
| logs | stderr; [`--json-output`](#logs) for machines | a line for every input, with its ids, counts, times and how it ended |
| traces | `--otlp-endpoint` | a span for every call |
| terminal | `tgis top` | the metrics of one instance, each second |
| dashboard | `deployment/monitoring/dashboard.json` | for Grafana; import it and choose a Prometheus |
| rules | `deployment/monitoring/rules.yaml` | recorded series and alerts, for Prometheus |

## Logs

With `--json-output` every line of the launcher, and so of all that it starts, is one JSON object:

```json
{"timestamp": "2026-01-31T12:00:00.123Z", "level": "INFO", "logger": "tgis.shard.server",
 "message": "rank 0 of 2 serves /model on /tmp/text-generation-x/shard-0", "process": "shard", "rank": 0}
```

- `process` is `launcher`, `router`, `shard` or, while one is converted, `tokenizer`; shards have their `rank`, and all
  lines the `node` where there are several.
- What libraries print is the `message` of an object whose `logger` is `output`: an object for each line, so that
  several belong to one crash. The level is read from the line, and is WARNING where it shows none. A line that is an
  object already keeps its fields and gets those that it lacks. Bytes that are no UTF-8 are replaced, and what is longer
  than 1 MiB is cut into several objects.
- An exception that nobody caught in Python is one object, its lines in `traceback`.
- A start that fails ends with level CRITICAL and the message `error: …`; the termination log has the reason as text.

## In a terminal

```shell
tgis top                                              # localhost:3000, until Ctrl-C
kubectl port-forward deploy/inference-server 3000 & tgis top
tgis top --target https://localhost:3000 --ca-cert ca.pem --server-name inference-server
tgis top --once --interval 5                          # one frame of plain text; exit status 1 without a service
```

![tgis top](pictures/top.png)

It reads `/metrics` and nothing else. Rates, means and quantiles are of the last `--window` seconds (10), between two
scrapes; quantiles are interpolated as Prometheus' `histogram_quantile` does it, evenly within a bucket, whose ends are
half as far again as those before. `generated` counts each token as it comes, also of inputs that have not ended;
`of prompts` counts those that were computed, not those found in the cache. `steps` shows how long a step took, how
much of it the shards computed, and the router's work after it. A service that goes away is told in one line and asked
again; one that comes back, or was started anew, begins a new window. In a pipe it prints frame after frame without
colours.

## Dashboard

![the dashboard's queries](pictures/dashboard.png)

The dashboard follows from `scripts/dashboard.py`. What it shows is chosen by `namespace`, `pod` and `instance`, labels
that a scrape configuration gives; where one is missing, All shows everything. `make deploy-check` asks each of its queries of a real
Prometheus that scrapes a real service. `make screenshots` made these pictures; Grafana itself had no part in them.

## Traces

`--otlp-endpoint http://collector:4317` and `pip install '.[otel]'`. Spans are named
`fmaas.GenerationService/Generate`; they continue the caller's `traceparent`, carry model, parameters, token counts,
finish reasons and the times in the queue, to the first token and in computing, and no text. A collector that is slow or
dead costs a call nothing. `deployment/monitoring/opentelemetry` has the configuration of a collector for traces and
metrics, and a kustomize component with the variables that send traces there.

## Recorded series

| series | what it is |
|---|---|
"""

RECORDED = {
    "tgis:calls:rate5m": "Calls per second",
    "tgis:failures:rate5m": "Failures per second, by `err`",
    "tgis:generated_tokens:rate5m": "Generated tokens per second",
    "tgis:time_to_first_token_seconds:p99_5m": "Time to the first token that one in a hundred inputs exceeds",
    "tgis:inter_token_seconds:p99_5m": "Time between two tokens that one in a hundred exceeds",
    "tgis:queue_seconds:p95_5m": "Time in the queue that one in twenty inputs exceeds",
    "tgis:prefix_hits:ratio5m": "Share of prompt tokens that the prefix cache had",
    "tgis:demand:ratio": "Live inputs per permit, to scale by",
}

ALERTS = """
All are of a service as a whole: its replicas, by `namespace` and `job`.

## Alerts

`promtool test rules deployment/monitoring/rules_test.yaml` sees each of them fire and not fire. Thresholds of latencies
(`TgisSlowFirstToken`, `TgisSlowTokens`) are to be set to what was promised.
"""


def render() -> str:
    rules = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    recorded = [f"| `{rule['record']}` | {RECORDED[rule['record']]} |" for rule in rules if "record" in rule]
    return INTRODUCTION + "\n".join([*recorded, ALERTS, *alerts(rules, tomllib.loads(CURES.read_text()))])


def alerts(rules: Iterable[dict[str, Any]], cures: dict[str, str]) -> list[str]:
    """An alert without a cure, or a cure without its alert, is an error."""
    found = {rule["alert"]: rule for rule in rules if "alert" in rule}
    if wrong := found.keys() ^ cures.keys():
        raise SystemExit(f"{CURES.name}, {RULES.name}: not an alert of both: {', '.join(sorted(wrong))}")
    return [_alert(rule, cures[name]) for name, rule in found.items()]


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
