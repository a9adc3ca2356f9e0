"""`tgis bench`: its options, its reports, and what it shows."""

import csv
import io
import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from tgis.cli import main as cli
from tgis.cli.bench.screen import LineListener, LiveListener, describe_length
from tgis.load.apis.catalogue import Endpoint
from tgis.load.apis.interface import LoadTarget
from tgis.load.campaign import FORM, BenchPlan, Level
from tgis.load.figures import summarize_level
from tgis.load.processes import RunRecord
from tgis.load.records import AnswerRecord
from tgis.load.report.files import write_report
from tgis.load.workload.conversations import Workload

LEVELS = (
    ("concurrency 1", 1, None, 1.0),
    ("concurrency 8", 8, None, 3.0),
    ("rate 2", 0, 2.0, 1.5),
    ("rate 9", 0, 9.0, 4.0),
)


def make_report(factor: float = 1.0) -> dict[str, Any]:
    levels = []
    for label, concurrency, rate, slowness in LEVELS:
        figures = summarize_level([make_run(factor * slowness)], None, {"ttft": 0.2})
        levels.append({"label": label, "concurrency": concurrency, "rate": rate, **figures})
    workload = {"input_tokens": "10", "output_tokens": "<5>", "seed": 0}
    settings = {"api": "fmaas", "target": "host:1 & <b>", "workload": workload, "duration_s": 2.0}
    settings |= {"requests": None, "processes": 1, "objectives": {"ttft": 0.2}}
    return {"form": FORM, "version": "0", "began": "now", "settings": settings, "levels": levels}


def make_run(slowness: float) -> RunRecord:
    records = []
    for index in range(50):
        first = 0.1 * slowness * (1 + index / 50)
        arrivals = [first, first + 0.02 * slowness, first + 0.05 * slowness]
        records.append(AnswerRecord(index, 0, 0.0, 0.0, 3, arrivals, [1, 2, 3], arrivals[-1], 10))
    records[-1].error = "UNAVAILABLE"
    return RunRecord(records, [0.99], [0.0], 1.0)


def make_plan(**more: Any) -> BenchPlan:
    levels = (Level("concurrency 1", 1), Level("concurrency 8", 8))
    target = LoadTarget(address="host:1")
    plan = {"endpoint": Endpoint("fmaas", target), "workload": Workload(), "levels": levels} | more
    return BenchPlan(**plan)  # type: ignore[arg-type]


def bench(*arguments: str) -> Result:
    return CliRunner().invoke(cli.main, ["bench", *arguments])


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--target", "nowhere"], "neither HOST:PORT nor"),
        (["--target", "ftp://host"], "neither HOST:PORT nor"),
        (["--target", "http://host", "--api", "fmaas"], "needs HOST:PORT"),
        (["--concurrency", "two"], "--concurrency needs numbers"),
        (["--concurrency", "0"], "positive"),
        (["--concurrency", "1.5"], "whole numbers"),
        (["--rate", "-1"], "positive"),
        (["--input-tokens", "many"], "distribution of lengths"),
        (["--constraints", "xml=1"], "list of shares"),
        (["--slo", "speed=1"], "cannot be an objective"),
        (["--trace", "/none"], "cannot be read"),
        (["--cert", "x"], "--cert and --key"),
        (["--report", "x.pdf"], "does not end in"),
        (["--report", "/none/x.json"], "not a folder"),
        (["--soft-prompts", "x", "--api", "engine"], "--api engine has no soft prompts"),
        (["--adapters", "x", "--api", "engine"], "--api engine has no adapters"),
        (["--constraints", "json=1", "--api", "lmi"], "--api lmi has no constraints"),
        (["--exact-input", "--api", "chat"], "--api chat has no cut prompts"),
        (["--exact-input", "--turns", "2"], "--exact-input cuts random prompts"),
        (["--top-k", "3"], "need --temperature"),
        (["--batch", "none"], "distribution of lengths"),
        (["--batch", "2", "--api", "tgi"], "--api tgi has no calls of several prompts"),
        (["--batch", "2", "--turns", "2"], "no conversation"),
        (["--distinct", "2", "--repeat-share", "0.5"], "exclude each other"),
        (["--target", "http://host", "--tls"], "a URL without TLS"),
        (["compare", "/none"], "cannot be read"),
        (["compare"], "Missing argument"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], why: str) -> None:
    result = bench(*arguments)
    assert result.exit_code in (1, 2)
    assert result.output.startswith("error: ")
    assert why in result.output
    assert result.output.count("\n") == 1


def test_the_page_loads_nothing_and_its_plots_are_whole(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_report(make_report(), path)
    text = path.read_text()
    assert "<b>" not in text
    for word in ("http:", "https:", "src=", "href=", "url(", "@import", "<script"):
        assert word not in text
    plots = [ET.fromstring(f"<svg{part.split('</svg>')[0]}</svg>") for part in text.split("<svg")[1:]]  # noqa: S314
    titles = [plot.attrib["aria-label"] for plot in plots]
    assert titles[0] == "Throughput over concurrency"
    assert "Time to first token over rate, ms" in titles
    assert "Whole request, rate 9" in titles
    bars = [
        len(plot.findall("rect")) for plot in plots if plot.attrib["aria-label"] == "Whole request, rate 9"
    ]
    assert bars[0] > 5
    assert "the load generator is the bottleneck" in text


def test_tables_have_a_row_per_load(tmp_path: Path) -> None:
    for suffix in (".csv", ".md", ".json"):
        write_report(make_report(), tmp_path / f"report{suffix}")
    rows = list(csv.DictReader(io.StringIO((tmp_path / "report.csv").read_text())))
    assert [row["load"] for row in rows] == [level[0] for level in LEVELS]
    assert float(rows[0]["ttft_p50_s"]) == pytest.approx(0.148)
    assert rows[0]["errors"] == "1"
    lines = [line for line in (tmp_path / "report.md").read_text().splitlines() if line.startswith("| ")]
    assert len(lines) == 2 + len(LEVELS)
    assert len({line.count("|") for line in lines}) == 1
    assert json.loads((tmp_path / "report.json").read_text()) == make_report()


def test_reports_are_compared(tmp_path: Path) -> None:
    for name, factor in (("a.json", 1.0), ("b.json", 2.0)):
        write_report(make_report(factor), tmp_path / name)
    paths = [str(tmp_path / name) for name in ("a.json", "b.json")]
    result = bench("compare", *paths)
    assert result.exit_code == 0
    [line] = [line for line in result.output.split("\n\n")[0].splitlines() if line.startswith("TTFT p50")]
    assert "148.0" in line
    assert "296.0 (+100.0%, worse)" in line
    same = bench("compare", paths[0], paths[0], "--markdown").output
    assert "worse" not in same
    assert "better" not in same
    assert same.count("| --- |") == len(LEVELS)


def test_other_files_are_not_compared(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    for text in ("{}", "[]", "no"):
        path.write_text(text)
        assert bench("compare", str(path)).exit_code == 1
    write_report(make_report(), path)
    other = make_report()
    other["levels"] = []
    write_report(other, tmp_path / "empty.json")
    assert "no level of the same load" in bench("compare", str(path), str(tmp_path / "empty.json")).output


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({}, "2 runs of 30 s: 60 s"),
        ({"levels": (Level("concurrency 1", 1),)}, "1 run of 30 s"),
        ({"num_repeats": 2, "precision": 0.05}, "4 runs or more of 30 s: 120 s or more"),
        ({"is_sweep": True, "duration_s": 10.0}, "9 runs of 10 s: 90 s"),
        ({"duration_s": None, "num_requests": 200}, "2 runs of 200 conversations"),
        ({"duration_s": None}, "2 runs"),
    ],
)
def test_the_length_of_a_measurement_is_announced(more: dict[str, Any], text: str) -> None:
    assert describe_length(make_plan(**more)) == text


def test_without_a_terminal_a_line_is_printed_every_few_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    times = iter(range(100, 200, 2))
    listener = LineListener(make_plan(), lambda: next(times))
    for level in (Level("concurrency 1", 1), Level("concurrency 8", 8)):
        listener.begin(level, 0)
        for _ in range(6):
            listener.progress({"progress": {"done": 3}, "open": 1})
        listener.end(level, make_report()["levels"][0])
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "2 runs of 30 s: 60 s, each after a warm-up"
    assert lines[1] == "concurrency 1: 6 of 30 s, 12 answers"
    assert [line.partition(":")[0] for line in lines[2:]] == ["concurrency 1", *["concurrency 8"] * 2]
    assert lines[2].endswith(" tokens/s")


def test_the_live_view_shows_the_length_during_the_warm_up() -> None:
    console = Console(file=io.StringIO(), width=90)
    listener = LiveListener(make_plan(), console)
    listener.begin(Level("concurrency 1", 1), 0)
    console.print(listener.draw())
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert text.split() == "concurrency 1 2 runs of 30 s: 60 s warming up".split()


def test_the_live_view_shows_finished_and_running_levels() -> None:
    console = Console(file=io.StringIO(), width=90)
    listener = LiveListener(make_plan(), console)
    listener.end(Level("concurrency 1", 1), make_report()["levels"][0])
    listener.begin(Level("concurrency 8", 8), 1)
    progress = {"done": 3, "failed": 1, "tokens": 30, "first": [0.01, 0.02, 0.4], "token": []}
    listener.progress({"progress": progress, "open": 8})
    console.print(listener.draw())
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "concurrency 1" in text
    assert "concurrency 8, run 2" in text
    assert "0 of 30 s, 8 open" in text
    assert "3 done" in text
    assert "1 failed" in text
    assert "p50 20.0 ms" in text
    assert "█" in text
    assert all(len(line.rstrip()) <= 90 for line in text.splitlines())
    assert len(text.splitlines()) == 5, "no line is wrapped"
