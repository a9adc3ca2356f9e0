"""`docs/metrics.md`, from the list of series that the router declares."""

from tgis.router.metrics.metric_types import Histogram, Series
from tgis.router.metrics.metrics import MetricLimits, Metrics

INTRODUCTION = """\
# Metrics

`GET /metrics` on the HTTP port (3000) answers in Prometheus' text format. The names, labels and buckets are those of
TGIS, so its dashboards and alerts go on working; every counter stands there under its bare name, which those
dashboards ask for, and with `_total`, which Prometheus expects (the bare one is typed as unknown, because the format
reserves counters for the other).

Series without labels are there from the start; those with labels appear with their first value.
"""

MAPPING = """\
## How a step counts

TGIS computed prompts and further tokens in separate calls to its shards. Here a step may compute both, so its terms
are mapped:

| TGIS | here |
|---|---|
| a prefill | a step that computes prompt tokens: new inputs, a further chunk of a long prompt, or a resumed input. `batch_size` counts its prompts |
| a next_token | a step that computes a further token of running inputs. `batch_size` counts those |
| a step with both | counts under `prefill` and under `next_token`; its durations go to `prefill` alone |
| `tgi_batch_inference_duration` | until the answer; where a step was sent ahead of the answer before it, from that answer on |
| `tgi_batch_inference_failure` | unanswered steps of lost shards, reason `connection`; the inputs in them resume |
| a concatenation | newcomers join a running batch |
| prefill weight exceeded | the first waiting input found too few free cache blocks; counted once each time a step is filled (TGIS counted twice, and padding too) |
| padding, granular additions, queue jumps | do not exist: nothing is padded, memory is counted in blocks, and inputs start in the order of their arrival. The series stay 0 |
| `tgi_batch_input_tokens` | input and generated tokens of the running inputs, without padding |
| `tgi_batch_max_remaining_tokens` | a sum, as in TGIS, whatever its name says |
| quantiles | of the last minute, at most 4,096 observations |
| `tgi_request_failure{err="cancelled"}` | at once, streamed or not (TGIS looked every 16 tokens) |
| tokens of a soft prompt | are no input: lengths do not count them. `tgi_batch_next_tokens` does, for they are computed |
| `tgi_prompt_load_duration` | from the look-up until all shards have loaded it, once for each load; what is loaded already adds nothing |
| `tgi_prompt_load_failure` | calls that were refused for their `prefix_id`, whether it was not found or not loaded |
| `tgi_prompt_cache_misses` | uses that had to wait for a load, be it one that another call began; look-ups that fail are neither hits nor misses |
| `tgi_request_failure{err="queue_full"}`, `{err="unknown"}` | never: there is no second queue to be full |
"""


def render() -> str:
    series = Metrics(MetricLimits(2048, 1024, 256)).series
    rows = [f"| `{one.name}` | {one.kind} | {_labels(one)} | {one.help} |" for one in series]
    table = ["## Series", "", "| name | kind | labels | meaning |", "|---|---|---|---|", *rows]
    return "\n".join([INTRODUCTION, *table, "", _buckets(series), MAPPING])


def _labels(series: Series) -> str:
    return ", ".join(f"`{name}`" for name in series.label_names) or "–"


def _buckets(series: list[Series]) -> str:
    """One row for all histograms of the same buckets."""
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
