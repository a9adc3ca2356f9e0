"""Declares the columns of the tables in every form of the report."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Level = dict[str, Any]
NOTHING = "–"


@dataclass(frozen=True)
class ReportColumn:
    """Number of a level, and how it is shown."""

    name: str
    """Name in CSV files."""
    title: str
    read: Callable[[Level], float | None]
    factor: float = 1.0
    digits: int = 1
    is_better_higher: bool | None = None
    """None: neither is better."""

    def show(self, level: Level) -> str:
        value = self.read(level)
        return NOTHING if value is None else f"{value * self.factor:.{self.digits}f}"


def _latency(name: str, title: str, quantile: str) -> ReportColumn:
    return ReportColumn(
        f"{name}_{quantile}_s",
        f"{title} {quantile}, ms",
        lambda level: level[name].get(quantile),
        factor=1000,
        digits=1,
        is_better_higher=False,
    )


COLUMNS = (
    ReportColumn("requests_per_s", "req/s", lambda level: level["requests_per_s"], 1, 2, True),
    ReportColumn("output_tokens_per_s", "tokens/s", lambda level: level["output_tokens_per_s"], 1, 1, True),
    ReportColumn("goodput_per_s", "good/s", lambda level: level["goodput_per_s"], 1, 2, True),
    _latency("ttft", "TTFT", "p50"),
    _latency("ttft", "TTFT", "p99"),
    _latency("itl", "ITL", "p50"),
    _latency("itl", "ITL", "p99"),
    _latency("tpot", "TPOT", "p50"),
    _latency("total", "whole", "p50"),
    _latency("total", "whole", "p99"),
    ReportColumn("cached_share", "cached, %", lambda level: level["cached_share"], 100, 1),
    ReportColumn(
        "errors", "errors", lambda level: sum(level["errors"].values()), 1, 0, is_better_higher=False
    ),
    ReportColumn(
        "faults", "wrong answers", lambda level: sum(level["faults"].values()), 1, 0, is_better_higher=False
    ),
)


def warnings_of(report: dict[str, Any]) -> list[str]:
    """Return a line for each thing that a reader of the figures must know."""
    lines = []
    for level in report["levels"]:
        label = level["label"]
        for kind, count in {**level["errors"], **level["faults"]}.items():
            example = level["messages"].get(kind)
            said = f", such as {example!r}" if example else ""
            lines.append(f"{label}: {count} of {level['requests']} requests: {kind}{said}")
        if level["cancelled"]:
            lines.append(f"{label}: {level['cancelled']} of {level['requests']} requests were cancelled")
        if reason := level["generator"]["bottleneck"]:
            lines.append(
                f"{label}: the load generator is the bottleneck: {reason}; "
                "use more --processes or another machine"
            )
    return lines
