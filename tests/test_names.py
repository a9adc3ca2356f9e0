"""Names of the package's classes."""

import ast
from collections import defaultdict
from pathlib import Path

import tgis

PACKAGE = Path(tgis.__file__).parent
GENERATED = PACKAGE / "pb"


def test_no_class_name_occurs_twice() -> None:
    files = defaultdict(list)
    for path in PACKAGE.rglob("*.py"):
        if GENERATED not in path.parents:
            for node in ast.parse(path.read_bytes()).body:
                if isinstance(node, ast.ClassDef):
                    files[node.name].append(str(path.relative_to(PACKAGE)))
    assert {name: paths for name, paths in files.items() if len(paths) > 1} == {}
