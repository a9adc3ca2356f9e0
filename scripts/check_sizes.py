"""Fails when a function of the package has more than 50 lines."""

import ast
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

MAX_FUNCTION = 50
ROOT = Path(__file__).resolve().parent.parent


def find_long_functions(path: Path) -> list[str]:
    name, errors = path.relative_to(ROOT), []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION:
                errors.append(f"{name}:{node.lineno} {node.name}: {length} lines, at most {MAX_FUNCTION}")
    return errors


def check(rule: Callable[[Path], list[str]], verdict: str) -> NoReturn:
    """Print the findings of `rule` in the package's files, or `verdict` if there are none, and exit."""
    sources = [path for path in (ROOT / "tgis").rglob("*.py") if "pb" not in path.parts]
    problems = [problem for path in sorted(sources) for problem in rule(path)]
    print("\n".join(problems) or f"{len(sources)} files {verdict}")
    sys.exit(bool(problems))


if __name__ == "__main__":
    check(find_long_functions, "without long functions")
