"""Generates `docs/metrics.md` from the router's declarations of series."""

from functools import partial

from tgis.router.api.vllm.series import VllmSeries
from tgis.router.metrics.metric_types import Histogram, Series
from tgis.router.metrics.metrics import MetricLimits, Metrics

INTRODUCTION = """\
# Metrics

This page lists every series, and how the series of TGIS and vLLM are counted here. `GET /metrics` on the HTTP
port (3000) returns Prometheus' text format. The names, labels and buckets are those of TGIS, so its dashboards and
alerts continue to work. Every counter is exported twice: under its bare name, which those dashboards query, and with
`_total`, which Prometheus expects. The bare one has the type unknown, because the format reserves the type counter for
names with `_total`. The counters `tgi_speculation_*` have `_total` only, because neither TGIS nor TGI had them; vLLM's
names for them have [`_total` as well](#under-vllms-names).

Series without labels exist from the start; those with labels appear with their first value.
"""

PROCESSES = """\
## Several processes

With several router workers, `/metrics` of any of them shows the whole router:

- Counters, histograms and summaries are the sums of all processes. Each process keeps its numbers in a file. The numbers
  of an ended process stay in the sums, and its successor continues with them.
- Counts of the prefix cache, preemptions, drafts, resources, inputs without room and TLS files are written to the file
  after each step and each second. What a process counts after that is lost if it is killed.
- Gauges are the sums over live processes; `tgi_ready` and `tgi_tls_certificate_seconds_left` are minimums. A worker that
  does not answer within half a second is omitted, also from `tgi_router_workers`. The engine process collects gauges:
  while it is lost, or does not answer within a second, its own gauges are 0, and the others are those of the worker
  that was scraped.
- `tgi_process_restarts` counts restarted processes.

With one router worker, the only process shows its own numbers, from memory.
"""

MAPPING = """\
## How a step counts

TGIS computed prompts and further tokens in separate calls to its shards. Here a step may compute both, so TGIS's terms
are mapped:

| TGIS | here |
|---|---|
| a prefill | a step that computes prompt tokens: new inputs, a further chunk of a long prompt, or a resumed input. `batch_size` counts its prompts |
| a next_token | a step that computes a further token of running inputs. `batch_size` counts those |
| a step with both | counts under `prefill` and under `next_token`; its durations go to `prefill` alone |
| `tgi_batch_inference_duration` | from sending to the answer; if the step was sent before the answer of the previous one, from that answer on |
| `tgi_batch_inference_failure` | unanswered steps of lost shards, reason `connection`; the inputs in them resume |
| a concatenation | new inputs join a running batch |
| prefill weight exceeded | the first waiting input found too few free cache blocks; counted once each time a step is filled (TGIS counted twice, and padding too) |
| padding, granular additions, queue jumps | none: nothing is padded, memory is counted in blocks, and no input overtakes one of its tenant and priority. The series stay 0 |
| `tgi_batch_input_tokens` | input and generated tokens of the running inputs, without padding |
| `tgi_batch_max_remaining_tokens` | a sum, as in TGIS, despite its name |
| quantiles | of the last minute, at most 4,096 observations of each process |
| `tgi_request_failure{err="cancelled"}` | at once, streamed or not (TGIS checked every 16 tokens) |
| tokens of a soft prompt | not input: lengths do not count them. `tgi_batch_next_tokens` does, because they are computed |
| `tgi_prompt_load_duration` | from the look-up until all shards have loaded it, once for each load; uses of a loaded prompt do not count |
| `tgi_prompt_load_failure` | calls that were refused for their `prefix_id`, whether it was not found or not loaded |
| `tgi_prompt_cache_misses` | uses that had to wait for a load, also for one that another call began; failed look-ups are neither hits nor misses |
| `tgi_request_failure{err="queue_full"}`, `{err="unknown"}` | never: there is no second queue that can be full |
"""


VLLM = """\
## Under vLLM's names

`--metrics-alias vllm` (`METRICS_ALIAS=vllm`) adds the series that vLLM's dashboards, KEDA's and KServe's examples, llm-d and
the Gateway API's inference extension query, with vLLM's types, labels and buckets. Those of TGIS do not change.
`model_name` is the first of `--served-model-name`; `engine` is always `0`. A counter has `_total` only. All
series exist from the start, except for `vllm:cache_config_info` and `vllm:lora_requests_info`, which wait for the shards.

"""

VLLM_DIFFERENCES = """
What is counted differs from vLLM in these points:

- A histogram that repeats one of TGIS's with other buckets counts the same events at the same time: those of the queue
  time and of the requested tokens therefore include inputs that fail later.
- `vllm:request_success_total` counts a text that ended by its time limit as `length`, as in answers. `abort` counts
  [`tgi_request_failure`](#series) of `cancelled` and `slow_reader`, `error` that of `generate`, which counts calls.
- `vllm:iteration_tokens_total` counts the tokens that a step computed, drafts too, but not those of the prefix cache.
- `vllm:prefix_cache_hits_total` over `vllm:prefix_cache_queries_total` is the hit rate, in tokens.
- `vllm:lora_requests_info` is a single sample, with the ids in alphabetical order. vLLM limits adapters by their number,
  this service by their bytes: `max_lora` changes with the size of the largest loaded one.
- The series `vllm_…` of some dashboards come from a collector that replaces the colon; these need it too.

[Autoscaling](https://keda.sh/docs/latest/scalers/prometheus/) by `vllm:num_requests_waiting` and
`vllm:num_requests_running` is in `deployment/overlays/vllm-metrics`.
"""


def render() -> str:
    series = Metrics(MetricLimits(2048, 1024, 256)).series
    table = ["## Series", "", *_table(series)]
    aliases = VLLM + "\n".join(_table(_vllm_series()))
    return (
        "\n".join(
            [
                INTRODUCTION,
                *table,
                "",
                _buckets(series),
                PROCESSES,
                MAPPING,
                aliases,
                VLLM_DIFFERENCES.rstrip(),
            ]
        )
        + "\n"
    )


def _vllm_series() -> list[Series]:
    aliases = Metrics(MetricLimits(2048, 1024, 256), partial(VllmSeries, "model", 2048)).aliases
    assert aliases is not None
    return aliases.series


def _table(series: list[Series]) -> list[str]:
    rows = [f"| `{one.name}` | {one.kind} | {_labels(one)} | {one.help} |" for one in series]
    return ["| name | kind | labels | meaning |", "|---|---|---|---|", *rows]


def _labels(series: Series) -> str:
    return ", ".join(f"`{name}`" for name in series.label_names) or "–"


def _buckets(series: list[Series]) -> str:
    """Return one row for all histograms with the same buckets."""
    names: dict[tuple[float, ...], list[str]] = {}
    for one in series:
        if isinstance(one, Histogram):
            names.setdefault(one.bounds, []).append(one.name)
    lines = [
        "## Buckets",
        "",
        "For `--max-sequence-length 2048 --max-new-tokens 1024 --max-batch-size 256`.",
        "",
    ]
    lines += ["| buckets | series |", "|---|---|"]
    for bounds, of in names.items():
        shown = f"{len(bounds)}, from {bounds[0]:.4g} by way of {bounds[1]:.4g} to {bounds[-1]:.4g}"
        what = "all that end in `duration`" if len(of) > 5 else ", ".join(f"`{name}`" for name in of)
        lines.append(f"| {shown} | {what} |")
    return "\n".join([*lines, ""])
