"""No module imports a test or a conftest: what several tests need is in `support/`, or beside them."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("tests", "integration_tests", "bench", "scripts")
# By lines, so that it finds code in strings, too: some tests give such code to another process.
IMPORTED_TEST = re.compile(
    r"^[ \t]*(?:from\s+[\w.]+\s+import\s*\([^)]*?|(?:from|import)\s[^\n(]*?)\b(test_\w+|conftest)\b",
    re.MULTILINE,
)


def test_no_module_imports_a_test() -> None:
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    assert Path(__file__) in files
    imported = {str(path.relative_to(ROOT)): IMPORTED_TEST.findall(path.read_text()) for path in files}
    assert {path: names for path, names in imported.items() if names} == {}


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("from tests.router.conftest import Setup", ["conftest"]),
        ("from tests.router import support, conftest", ["conftest"]),
        ("import os\nimport tests.test_docs as docs", ["test_docs"]),
        ("def late():\n    from .test_docs import ROOT", ["test_docs"]),
        ("from tests import (\n    support,\n    test_docs,\n)", ["test_docs"]),
        ("import pytest_asyncio\nfrom tests.support.pages import (\n    links,\n)\n\ndef test_links():", []),
        ('"""Like test_docs.py, from which it differs."""\nfrom tests.support import pages', []),
    ],
)
def test_imports_of_tests_are_recognized(source: str, names: list[str]) -> None:
    assert IMPORTED_TEST.findall(source) == names
