"""Fails when a docstring of the package begins as a fragment: "Of the shards", "What a step costs"."""

import ast
import sys
from pathlib import Path

FRAGMENTS = frozenset("Of What To Who Where Whether How As With From By".split())
ROOT = Path(__file__).resolve().parent.parent
DOCUMENTED = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module


def fragments(path: Path) -> list[str]:
    """Return a line for each docstring of the file that begins with one of FRAGMENTS."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        text = ast.get_docstring(node) if isinstance(node, DOCUMENTED) else None
        if text and text.split()[0].rstrip(",.:;") in FRAGMENTS:
            line = getattr(node, "lineno", 1)
            found.append(f"{path.relative_to(ROOT)}:{line}: a docstring begins with {text.split()[0]!r}")
    return found


if __name__ == "__main__":
    sources = [path for path in (ROOT / "tgis").rglob("*.py") if "pb" not in path.parts]
    problems = [problem for path in sorted(sources) for problem in fragments(path)]
    print("\n".join(problems) or f"{len(sources)} files without docstrings that are fragments")
    sys.exit(bool(problems))
