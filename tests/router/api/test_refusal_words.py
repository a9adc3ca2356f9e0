"""Checks that refusals have bounds in one form: numbers by `<=`, as in TGIS, and counts by `at most`."""

import re
from pathlib import Path

import pytest

import tgis.router

NUMBER = r"(-?[0-9]|\{)"
WORDED = re.compile(
    rf"""must (be|have) (at (most|least)|(more|less) than) {NUMBER}[^ "']*["']"""
    "|must not (be|have) (less|more)"
)


def find_worded(text: str) -> list[str]:
    """Return the bounds in a source text that are not in this form."""
    return [match[0] for match in WORDED.finditer(text)]


@pytest.mark.parametrize(
    "text",
    [
        'f"n must be at most {MAX_N}"',
        '"top_k must be at least -1"',
        'f"{field} must not be more than {max_bytes} UTF8 bytes"',
        '"best_of must not be less than n"',
    ],
)
def test_other_forms_are_found(text: str) -> None:
    assert find_worded(text)


@pytest.mark.parametrize("text", ['"n must be <= 128"', 'f"inputs must have at most {maximum} texts"'])
def test_this_form_is_accepted(text: str) -> None:
    assert not find_worded(text)


def test_refusals_have_one_form() -> None:
    (root,) = tgis.router.__path__
    found = {str(path): find_worded(path.read_text()) for path in Path(root).rglob("*.py")}
    assert len(found) > 100
    assert not {path: texts for path, texts in found.items() if texts}
