"""Writes reports as aligned text, Markdown and CSV."""

import csv
import io
from collections.abc import Sequence
from typing import Any

from tgis.load.report.columns import COLUMNS, warnings_of

Report = dict[str, Any]
Rows = list[list[str]]


def table_rows(report: Report) -> Rows:
    """Return the header and a row per level."""
    header = ["load", *(column.title for column in COLUMNS)]
    return [
        header,
        *([level["label"], *(column.show(level) for column in COLUMNS)] for level in report["levels"]),
    ]


def write_text(report: Report) -> str:
    """Return the table that is printed: a column per level, which fits into a terminal."""
    turned = [list(column) for column in zip(*table_rows(report), strict=True)]
    return "\n".join([align(turned), *warnings_of(report)])


def align(rows: Rows) -> str:
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def write_markdown(report: Report) -> str:
    settings = report["settings"]
    lines = [f"# {settings['api']} at {settings['target']}", "", *describe_settings(report), ""]
    lines += markdown_table(table_rows(report))
    if warnings := warnings_of(report):
        lines += ["", *(f"- {line}" for line in warnings)]
    return "\n".join(lines) + "\n"


def markdown_table(rows: Sequence[Sequence[str]]) -> list[str]:
    header, *body = rows
    rule = ["---", *["---:"] * (len(header) - 1)]
    return [f"| {' | '.join(row)} |" for row in (header, rule, *body)]


def describe_settings(report: Report) -> list[str]:
    settings = report["settings"]
    workload = settings["workload"]
    length = f"{settings['requests']} requests" if settings["requests"] else f"{settings['duration_s']} s"
    tokens = f"Inputs of {workload['input_tokens']} and answers of {workload['output_tokens']} tokens"
    processes = f"{settings['processes']} load processes"
    lines = [
        f"{report['began']}, tgis {report['version']}, {length} per run, {processes}.",
        f"{tokens}, seed {workload['seed']}.",
    ]
    if settings["objectives"]:
        limits = ", ".join(f"{name} ≤ {limit} s" for name, limit in settings["objectives"].items())
        lines.append(f"Good requests: {limits}.")
    return lines


def write_csv(report: Report) -> str:
    """Return a line per level, with times in seconds and shares from 0 to 1."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["load", "concurrency", "rate", *(column.name for column in COLUMNS)])
    for level in report["levels"]:
        given = [level["label"], level["concurrency"] or "", level["rate"] or ""]
        writer.writerow([*given, *("" if (v := column.read(level)) is None else v for column in COLUMNS)])
    return out.getvalue()
