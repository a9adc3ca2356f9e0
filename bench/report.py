"""The measurement as Markdown."""

import math
from collections.abc import Sequence
from typing import Any

MIB = 1 << 20
HEAD = (
    "clients",
    "call",
    "output tok/s",
    "decode tok/s",
    "first token ms p50 / p90 / p99",
    "per token ms p50 / p90 / p99",
    "whole answer ms p50 / p90 / p99",
)


def format_report(result: dict[str, Any]) -> str:
    """`result` is what the JSON file holds."""
    parts = [_describe(result), _format_table(HEAD, [_service_row(entry) for entry in result["service"]])]
    if result["loading"]:
        parts.append(_describe_loading(result["loading"]))
    if result["peers"]:
        parts.append(_format_peers(result["peers"]))
    failed = sum(int(entry["figures"]["failed"]) for entry in result["service"])
    if failed:
        parts.append(
            f"**{failed} requests failed**; the figures leave them out. First: {_first_error(result)}"
        )
    return "\n\n".join(parts) + "\n"


def _describe(result: dict[str, Any]) -> str:
    machine, load = result["machine"], result["load_average"]
    return (
        f"`{result['model']}`, {result['input_tokens']} input and {result['new_tokens']} new tokens, greedy, "
        f"median of {result['repeat']}. {machine['cpu']}, {machine['usable_cores']} cores: "
        f"reads {machine['read_gb_per_s']:.1f} GB/s, float32 GEMM {machine['gemm_gflop_per_s']:.0f} GFLOP/s. "
        f"Load average {load['before'][0]:.2f} before, {load['after'][0]:.2f} after."
    )


def _describe_loading(loading: dict[str, float]) -> str:
    size, most, kept = (loading[f"{name}_bytes"] for name in ("file", "peak", "kept"))
    return (
        f"Loading: {size / MIB:.0f} MiB of files in {loading['seconds']:.1f} s; at most {most / MIB:.0f} MiB "
        f"of memory ({most / size:.2f} times the files) while it lasts, {kept / MIB:.0f} MiB "
        f"({kept / size:.2f} times) afterwards."
    )


def _service_row(entry: dict[str, Any]) -> list[str]:
    figures = entry["figures"]
    return [
        str(entry["clients"]),
        entry["mode"],
        _number(figures["output_tokens_per_s"]),
        _number(figures.get("decode_tokens_per_s")),
        *(_percentiles(figures, name) for name in ("first_token_ms", "token_ms", "answer_ms")),
    ]


def _format_peers(peers: Sequence[dict[str, Any]]) -> str:
    head = ("batch", "output tok/s", "decode tok/s", "first token ms", "per token ms")
    names = ("output_tokens_per_s", "decode_tokens_per_s", "first_token_ms", "token_ms")
    rows = [[str(peer["batch_size"]), *(_number(peer[name]) for name in names)] for peer in peers]
    return "transformers `generate`, float32, same model and numbers of tokens:\n\n" + _format_table(
        head, rows
    )


def _format_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _percentiles(figures: dict[str, float], name: str) -> str:
    values = [figures.get(f"{name}_p{percent}") for percent in (50, 90, 99)]
    return "–" if values[0] is None else " / ".join(_number(value) for value in values)


def _number(value: float | None) -> str:
    if value is None or math.isnan(value):
        return "–"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _first_error(result: dict[str, Any]) -> str:
    answers = (
        answer for entry in result["service"] for repeat in entry["repeats"] for answer in repeat["answers"]
    )
    return next(str(answer["error"]) for answer in answers if answer["error"])
