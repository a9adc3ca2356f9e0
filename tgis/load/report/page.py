"""Writes reports as one HTML page that loads nothing."""

from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from tgis.load.report.columns import warnings_of
from tgis.load.report.plots import PlotSeries, draw_histogram, draw_lines
from tgis.load.report.texts import describe_settings, table_rows

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 1000px; padding: 0 1rem; }
table { border-collapse: collapse; } th, td { padding: .2rem .6rem; text-align: right; }
th:first-child, td:first-child { text-align: left; } tr { border-bottom: 1px solid #8884; }
.plots { display: flex; flex-wrap: wrap; gap: 1rem; } svg { width: 460px; max-width: 100%; }
svg text { font: 11px system-ui, sans-serif; fill: currentColor; } svg .title { font-weight: 600; }
.grid { stroke: #8884; } .scroll { overflow-x: auto; } .warning { color: #c05621; }
@media (prefers-color-scheme: dark) { body { background: #1a202c; color: #e2e8f0; } }
"""
HISTOGRAMS = {
    "ttft": "Time to first token",
    "itl": "Time between messages",
    "total": "Whole request",
}
Report = dict[str, Any]


def write_page(report: Report) -> str:
    settings = report["settings"]
    title = escape(f"{settings['api']} at {settings['target']}")
    facts = "".join(f"<p>{escape(line)}</p>" for line in describe_settings(report))
    warnings = "".join(f'<p class="warning">{escape(line)}</p>' for line in warnings_of(report))
    plots = "".join(_plots(report["levels"]))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{STYLE}</style></head><body><h1>{title}</h1>{facts}{warnings}"
        f'<div class="scroll">{_table(report)}</div><div class="plots">{plots}</div></body></html>\n'
    )


def _table(report: Report) -> str:
    header, *rows = table_rows(report)
    lines = [_row("th", header), *(_row("td", row) for row in rows)]
    return f"<table>{''.join(lines)}</table>"


def _row(kind: str, cells: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<{kind}>{escape(cell)}</{kind}>" for cell in cells) + "</tr>"


def _plots(levels: Sequence[dict[str, Any]]) -> Iterator[str]:
    closed = [level for level in levels if level["concurrency"]]
    yield draw_lines(
        "Throughput over concurrency",
        "requests at a time",
        [PlotSeries("tokens/s", [(one["concurrency"], one["output_tokens_per_s"]) for one in closed])],
    )
    opened = [level for level in levels if level["rate"]]
    for name, title in HISTOGRAMS.items():
        yield draw_lines(f"{title} over rate, ms", "requests per second", _quantiles(opened, name, "rate"))
        yield draw_lines(
            f"{title} over concurrency, ms", "requests at a time", _quantiles(closed, name, "concurrency")
        )
    for level in levels:
        for name, title in HISTOGRAMS.items():
            bins = level["histograms"][name]
            yield draw_histogram(f"{title}, {level['label']}", bins["edges"], bins["counts"])


def _quantiles(levels: Sequence[dict[str, Any]], name: str, axis: str) -> list[PlotSeries]:
    return [
        PlotSeries(
            quantile,
            [
                (one[axis], one[name][quantile] * 1000)
                for one in levels
                if one[name].get(quantile) is not None
            ],
        )
        for quantile in ("p50", "p99")
    ]
