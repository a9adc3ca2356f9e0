"""Formats the measurement as Markdown."""

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from bench.clients import UNARY
from bench.contest import Sample, Spread
from bench.targets import ALL_TARGETS, Figure, Target

TARGET_HEAD = ("what", "as", "measured", "target", "", "runs", "detail")
HEAD = (
    "clients",
    "call",
    "output tok/s",
    "decode tok/s",
    "first token ms p50 / p90 / p99",
    "between messages ms p50 / p90 / p99",
    "whole answer ms p50 / p90 / p99",
)


def format_report(result: dict[str, Any]) -> str:
    """Return the page; `result` is the result of `measure`."""
    parts = [_describe(result)]
    if result["figures"] or result["missing"]:
        parts.append(format_targets(result["figures"], result["missing"], result["shape_name"]))
    if result["service"]:
        parts += _format_clients(result)
    return "\n\n".join(parts) + "\n"


def format_targets(figures: Sequence[Figure], missing: Mapping[str, str], shape: str) -> str:
    """Return the table of all measured figures, in the order of the targets; `missing` has the reasons for
    the others, by key."""
    by_key, rows = {figure.key: figure for figure in figures}, []
    for target in ALL_TARGETS:
        bound = target.bound_of(shape)
        if target.key in by_key:
            rows.append(_target_row(target, by_key.pop(target.key), shape))
        elif target.key in missing and bound is not None:
            rows.append([target.name, target.how, "–", _bound(target, bound), missing[target.key], "", ""])
    return format_table(TARGET_HEAD, rows + [_other_row(figure) for figure in by_key.values()])


def _target_row(target: Target, figure: Figure, shape: str) -> list[str]:
    bound, met = target.bound_of(shape), target.is_met(figure.spread.median, shape)
    verdict = {True: "pass", False: "**miss**", None: "–"}[met]
    median, spread = _measured(figure)
    return [target.name, target.how, median, _bound(target, bound), verdict, spread, figure.detail]


def _other_row(figure: Figure) -> list[str]:
    median, spread = _measured(figure)
    return [figure.key, "", median, "–", "–", spread, figure.detail]


def _measured(figure: Figure) -> tuple[str, str]:
    spread = figure.spread
    if spread.count == 1:
        return _ratio(spread.median), "one run"
    return _ratio(spread.median), f"{_ratio(spread.low)} to {_ratio(spread.high)} in {spread.count}"


def _bound(target: Target, bound: float | None) -> str:
    return "–" if bound is None else f"{'≤' if target.at_most else '≥'} {bound:g}"


def _ratio(value: float) -> str:
    return f"{value:.3g}"


def _describe(result: dict[str, Any]) -> str:
    machine, load = result["machine"], result["load_average"]
    return (
        f"`{result['model']}`, {result['input_tokens']} input and {result['new_tokens']} new tokens, greedy. "
        f"{machine['cpu']}, {machine['usable_cores']} cores: {_describe_limits(result)}. "
        f"Load average {load['before'][0]:.2f} before, {load['after'][0]:.2f} after."
    )


def _describe_limits(result: dict[str, Any]) -> str:
    machine, samples = result["machine"], result["samples"]
    if samples:
        return describe_looks(samples)
    instructions = _describe_instructions(machine["bfloat16_gflop_per_s"], machine["int8_gop_per_s"])
    gemm = machine["gemm_gflop_per_s"]
    return f"reads {machine['read_gb_per_s']:.1f} GB/s, float32 GEMM {gemm:.0f} GFLOP/s, {instructions}"


def describe_looks(samples: Sequence[Sample]) -> str:
    """Describe the machine's limits and their variation; no figure is more certain than that."""
    looks = [look for sample in samples for look in sample.looks]
    read, gemm = (Spread.of([getattr(look, name) / 1e9 for look in looks]) for name in ("read", "gemm"))
    pairs = _median_of([look.bfloat16 for look in looks])
    quads = _median_of([look.int8 for look in looks])
    return (
        f"reads {read.median:.1f} GB/s ({read.low:.1f} to {read.high:.1f} over the run), "
        f"float32 GEMM {gemm.median:.0f} GFLOP/s ({gemm.low:.0f} to {gemm.high:.0f}), "
        f"{_describe_instructions(pairs, quads)}"
    )


def _median_of(rates: Sequence[float | None]) -> float | None:
    """Return the median of the measured rates, in billions."""
    known = [rate for rate in rates if rate is not None]
    return statistics.median(known) / 1e9 if known else None


def _describe_instructions(pairs: float | None, quads: float | None) -> str:
    """Describe rates on registers, given in billions of operations per second."""
    return f"{_format_rate(pairs, 'GFLOP/s')} with AVX512_BF16, {_format_rate(quads, 'GOP/s')} with VNNI"


def _format_rate(rate: float | None, unit: str) -> str:
    return "unmeasured" if rate is None else f"{rate:.0f} {unit}"


def _format_clients(result: dict[str, Any]) -> list[str]:
    entries = result["service"]
    head = f"Closed-loop clients, {result['rounds']} runs, medians of their rates:"
    parts = [f"{head}\n\n{format_table(HEAD, [_service_row(entry) for entry in entries])}"]
    errors = sum((Counter(entry["figures"]["errors"]) for entry in entries), Counter[str]())
    if errors:
        kinds = ", ".join(f"{kind} {count}" for kind, count in errors.items())
        parts.append(f"**{errors.total()} requests failed**: {kinds}; the latencies leave them out.")
    return parts


def _service_row(entry: dict[str, Any]) -> list[str]:
    figures = entry["figures"]
    return [
        str(entry["clients"]),
        entry["mode"],
        _number(figures["output_tokens_per_s"]),
        _number(figures["decode_tokens_per_s"]),
        # A whole answer has no first token of its own.
        "–" if entry["mode"] == UNARY else _percentiles(figures["ttft"]),
        *(_percentiles(figures[name]) for name in ("itl", "total")),
    ]


def format_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _percentiles(seconds: dict[str, float]) -> str:
    if not seconds["count"]:
        return "–"
    return " / ".join(_number(1e3 * seconds[name]) for name in ("p50", "p90", "p99"))


def _number(value: float | None) -> str:
    if value is None or math.isnan(value):
        return "–"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"
