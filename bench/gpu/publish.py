"""Puts the report of a run into docs/gpu.md: `python -m bench.gpu.publish RESULTS`."""

import sys
from datetime import UTC, datetime
from pathlib import Path

from bench.gpu.report import find_predictions, format_report
from bench.gpu.results import keep_last_attempts, read_results
from bench.gpu.stages import STAGES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "gpu.md"
BEGIN, END = "<!-- report of a run -->", "<!-- end of the report -->"


def main() -> None:
    path = Path(sys.argv[1])
    results = keep_last_attempts(read_results(path))
    if not results:
        sys.exit(f"{path} has no results")
    day = datetime.fromtimestamp(path.stat().st_mtime, UTC).date()
    report = format_report(results, STAGES, find_predictions(results))
    PAGE.write_text(replace_report(PAGE.read_text(), f"Run of {day}.\n\n{report}"))


def replace_report(page: str, report: str) -> str:
    """Return the page with a new report between its marks."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin
    assert end
    return f"{before}{BEGIN}\n\n{report.strip()}\n\n{END}{after}"


if __name__ == "__main__":
    main()
