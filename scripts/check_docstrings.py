"""Fails when a docstring of the package begins as a fragment: "Of the shards", "What a step costs"."""

import ast
from pathlib import Path

from scripts.check_sizes import ROOT, check

FRAGMENTS = frozenset("Of What To Who Where Whether How As With From By".split())
DOCUMENTED = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module


def fragments(path: Path) -> list[str]:
    """Return a line for each docstring of the file that begins with one of FRAGMENTS."""
    errors = []
    for node in ast.walk(ast.parse(path.read_text())):
        text = ast.get_docstring(node) if isinstance(node, DOCUMENTED) else None
        if text and text.split()[0].rstrip(",.:;") in FRAGMENTS:
            line = getattr(node, "lineno", 1)
            errors.append(f"{path.relative_to(ROOT)}:{line}: a docstring begins with {text.split()[0]!r}")
    return errors


if __name__ == "__main__":
    check(fragments, "without docstrings that are fragments")
