"""Compares the levels that reports have in common."""

from collections.abc import Iterator, Sequence
from typing import Any

from tgis.load.errors import LoadError
from tgis.load.report.columns import COLUMNS, NOTHING, ReportColumn
from tgis.load.report.texts import align, markdown_table

Level = dict[str, Any]
NOISE = 0.02
"""Difference that is not marked, unless intervals tell more."""


def compare(reports: Sequence[tuple[str, dict[str, Any]]], is_markdown: bool) -> str:
    """Return a table for each common level: a row per figure, with the change from the first report.

    Raises LoadError if there is none."""
    names = [name for name, _ in reports]
    by_label = [{level["label"]: level for level in report["levels"]} for _, report in reports]
    labels = [label for label in by_label[0] if all(label in levels for levels in by_label)]
    if not labels:
        raise LoadError("the reports have no level of the same load")
    parts = []
    for label in labels:
        rows = [[label, *names], *_rows([levels[label] for levels in by_label])]
        parts.append("\n".join(markdown_table(rows)) if is_markdown else align(rows))
    return "\n\n".join(parts)


def _rows(levels: Sequence[Level]) -> Iterator[list[str]]:
    first, *others = levels
    for column in COLUMNS:
        yield [column.title, column.show(first), *(_changed(column, first, other) for other in others)]


def _changed(column: ReportColumn, first: Level, other: Level) -> str:
    before, after = column.read(first), column.read(other)
    shown = column.show(other)
    if not before or after is None or shown == NOTHING:
        return shown
    change = after / before - 1
    return f"{shown} ({change:+.1%}{_verdict(column, change, first, other)})"


def _verdict(column: ReportColumn, change: float, first: Level, other: Level) -> str:
    if column.is_better_higher is None or abs(change) < NOISE or _overlap(column, first, other):
        return ""
    return ", better" if (change > 0) == column.is_better_higher else ", worse"


def _overlap(column: ReportColumn, first: Level, other: Level) -> bool:
    """Return True if both have intervals of the figure, and these overlap."""
    one, two = (_interval(column, level) for level in (first, other))
    return one is not None and two is not None and one[0] <= two[1] and two[0] <= one[1]


def _interval(column: ReportColumn, level: Level) -> list[float] | None:
    if column.name in level["intervals"]:
        interval: list[float] | None = level["intervals"][column.name]
        return interval
    name, _, quantile = column.name.removesuffix("_s").partition("_")
    figures = level.get(name)
    return figures.get(f"{quantile}_interval") if isinstance(figures, dict) else None
