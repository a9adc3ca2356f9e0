"""Reads and writes the files of reports."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tgis.load.errors import LoadError
from tgis.load.report.page import write_page
from tgis.load.report.texts import write_csv, write_markdown

FORM = 1


def _write_json(report: dict[str, Any]) -> str:
    return json.dumps(report, indent=1, ensure_ascii=False) + "\n"


WRITERS: dict[str, Callable[[dict[str, Any]], str]] = {
    ".json": _write_json,
    ".md": write_markdown,
    ".csv": write_csv,
    ".html": write_page,
}


def check_path(path: Path) -> None:
    """Fail before the measurement if the report could not be written. Raises LoadError."""
    if path.suffix not in WRITERS:
        raise LoadError(f"{path} does not end in one of {', '.join(WRITERS)}")
    if not path.absolute().parent.is_dir():
        raise LoadError(f"{path.parent} is not a folder")


def write_report(report: dict[str, Any], path: Path) -> None:
    """Write the form that the path's suffix names. Raises LoadError."""
    try:
        path.write_text(WRITERS[path.suffix](report), encoding="utf-8")
    except OSError as error:
        raise LoadError(f"{path} cannot be written: {error.strerror}") from error


def read_report(path: Path) -> dict[str, Any]:
    """Return a report that was written as JSON. Raises LoadError."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise LoadError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise LoadError(f"{path} is not JSON") from error
    if not isinstance(report, dict) or report.get("form") != FORM:
        raise LoadError(f"{path} is not a report of tgis bench, or of another version")
    return report
