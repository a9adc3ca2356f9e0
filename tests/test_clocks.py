"""Durations come from a clock that nobody can set: a date is asked for only where a date is meant."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "tgis"
DATES = {("time", name) for name in ("time", "time_ns", "localtime", "gmtime", "strftime", "ctime")}
DATES |= {("datetime", name) for name in ("now", "utcnow", "today")}
ALLOWED = {
    "logs.py": "a line's time",
    "process/json_lines.py": "the same",
    "net/tls.py": "the end of a certificate",
    "process/run_directory.py": "the age of a directory",
    "prompts/artifact_cache.py": "the age of a file",
    "prompts/snapshot.py": "the age of a file",
    "cli/top/screen.py": "the time of a frame",
    "load/campaign.py": "when a measurement began",
    "router/api/openai/answers/dates.py": "when an answer was made",
    "router/api/vllm_engine/cache_feed.py": "when blocks changed; numbers that grow with restarts",
    "router/api/vllm_engine/load_records.py": "when a load was read",
    "router/api/vllm_engine/servicer.py": "when the last call arrived, and when loads were read",
    "router/engine/kv_events.py": "when blocks changed",
    "router/api/vllm/series.py": "when adapters were counted, which is a series' value in vLLM",
}


def dates(source: str) -> list[int]:
    """Lines that ask what time of day it is."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            lines += [node.lineno] * ((node.value.id, node.attr) in DATES)
        if isinstance(node, ast.ImportFrom):
            lines += [node.lineno for alias in node.names if (node.module, alias.name) in DATES]
    return lines


def test_only_dates_are_asked_of_the_clock_on_the_wall() -> None:
    sources = [path for path in ROOT.rglob("*.py") if "pb" not in path.parts]
    asking = {str(path.relative_to(ROOT)): dates(path.read_text()) for path in sources}
    assert {name for name, lines in asking.items() if lines} == set(ALLOWED)


@pytest.mark.parametrize(
    "source", ["import time\nbegan = time.time()", "from time import time", "datetime.now()"]
)
def test_they_would_be_found(source: str) -> None:
    assert dates(source)
