"""Fails when a function of a package has more than 50 lines, or a folder more than 12 modules."""

import ast
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

MAX_FUNCTION = 50
MAX_MODULES = 12
LISTS = ("tgis/shard/models/families",)  # folders of one module for each entry of a table
ROOT = Path(__file__).resolve().parent.parent
PACKAGES = (ROOT / "tgis", ROOT / "client" / "tgis_client")


def find_long_functions(path: Path) -> list[str]:
    name, errors = path.relative_to(ROOT), []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION:
                errors.append(f"{name}:{node.lineno} {node.name}: {length} lines, at most {MAX_FUNCTION}")
    return errors


def find_large_folder(path: Path) -> list[str]:
    """Return the finding for a folder, given the path of its `__init__.py`."""
    name = str(path.parent.relative_to(ROOT))
    if path.name != "__init__.py" or name in LISTS:
        return []
    count = len([*path.parent.glob("*.py")]) - 1
    return [f"{name}: {count} modules, at most {MAX_MODULES}"] if count > MAX_MODULES else []


def find_faults(path: Path) -> list[str]:
    return find_long_functions(path) + find_large_folder(path)


def check(rule: Callable[[Path], list[str]], verdict: str) -> NoReturn:
    """Print the findings of `rule` in the packages' files, or `verdict` if there are none, and exit."""
    sources = [path for each in PACKAGES for path in each.rglob("*.py") if "pb" not in path.parts]
    problems = [problem for path in sorted(sources) for problem in rule(path)]
    print("\n".join(problems) or f"{len(sources)} files {verdict}")
    sys.exit(bool(problems))


if __name__ == "__main__":
    check(
        lambda path: find_long_functions(path) + find_large_folder(path),
        "without long functions or large folders",
    )
