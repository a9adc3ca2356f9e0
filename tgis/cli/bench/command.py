"""Defines the command `bench`, and its subcommand `compare`."""

import asyncio
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tgis.cli.bench.options import BenchLoad, BenchOutput, BenchPlace, BenchPrompts
from tgis.cli.command import RunnableGroup
from tgis.cli.command import command as build_command
from tgis.config.option import option
from tgis.load.report.comparison import compare as compare_reports
from tgis.load.report.files import check_path, read_report, write_report
from tgis.load.report.texts import write_text

if TYPE_CHECKING:
    from tgis.load.campaign import BenchPlan


@dataclass(frozen=True, kw_only=True)
class CompareOutput:
    markdown: bool = option("Print tables of Markdown.", False, env=False)


def bench(place: BenchPlace, load: BenchLoad, prompts: BenchPrompts, output: BenchOutput) -> None:
    """Measure, print the table, and write the reports."""
    # Imports inside functions load what would slow down the start of every other command.
    from tgis.cli.bench.plan import make_plan

    plan = make_plan(place, load, prompts, output)
    paths = [Path(path) for path in output.report]
    for path in paths:
        check_path(path)
    report = _run(plan, output.quiet)
    click.echo(write_text(report))
    for path in paths:
        write_report(report, path)


def _run(plan: "BenchPlan", is_quiet: bool) -> dict[str, Any]:
    from tgis.load.campaign import CampaignListener, run_campaign

    if is_quiet:
        return asyncio.run(run_campaign(plan, CampaignListener()))
    from tgis.cli.bench.screen import LineListener, LiveListener

    if not sys.stderr.isatty():
        return asyncio.run(run_campaign(plan, LineListener(plan)))
    with LiveListener(plan) as listener:
        return asyncio.run(run_campaign(plan, listener))


def compare(output: CompareOutput, reports: tuple[str, ...]) -> None:
    """Print the figures of the reports beside each other."""
    read = [(path, read_report(Path(path))) for path in reports]
    click.echo(compare_reports(read, output.markdown))


command = RunnableGroup(
    "bench",
    bench,
    "Load a service and measure its answers.",
    (BenchPlace, BenchLoad, BenchPrompts, BenchOutput),
    commands=[
        build_command(
            "compare",
            compare,
            "Print how reports that were written as JSON differ from the first one.",
            CompareOutput,
            extra=[click.Argument(["reports"], nargs=-1, required=True, metavar="REPORT.json...")],
        )
    ],
)
